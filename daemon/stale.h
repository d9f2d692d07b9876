/* SPDX-License-Identifier: Apache-2.0 */
/* Files that an earlier run of this daemon has left behind. */
#ifndef KVD_DAEMON_STALE_H
#define KVD_DAEMON_STALE_H

struct log;

/* Removes the segments of an earlier run from a runtime directory whose lock we hold, and marks its
 * indexes as retired, so that workers that still have them mapped find nothing in them. Files that
 * are not kvd's stay, whatever their name. Returns how many were removed, or a negative errno. */
int stale_sweep(const char *runtime_dir, struct log *log);

/* Removes this daemon's files from a hugetlbfs mount: those named for `runtime_dir`. */
int stale_sweep_hugetlbfs(const char *dir, const char *runtime_dir, struct log *log);

#endif
