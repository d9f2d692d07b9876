/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Spill stores of real daemons: folders below /var/tmp for them, devices that can be made to hang, what
 * the daemon and kvctl say of them.
 *
 * A device is a loop device of our own over a file, in a mount namespace of our own, and detaches itself
 * when we are gone. HOLDING it is done by the block layer: a control group whose limits on this device
 * are next to nothing. Whatever a process in the group asks of the device stays where it is until the
 * limits are lifted, also when the process has died meanwhile; others are not concerned.
 */
#ifndef KVD_TESTS_STORES_H
#define KVD_TESTS_STORES_H

#include "harness.h"

/* .init and .fini of the suites; they call those of the harness. */
void stores_init(void);
void stores_fini(void);

/* A folder below /var/tmp. */
void stores_folder(char ret_dir[64]);

struct device {
    char dir[64];   /* the image lies here */
    char path[32];  /* /dev/loopN */
    char mount[96]; /* of its file system, "" if it has none */
    char group[96]; /* the control group, "" if there is none */
    bool v2;
    int fd;
};

/* mkfs: a command that makes a file system of the device, NULL: none. Skips the test when that cannot be
 * done here. */
void device_make(struct device *v, uint64_t bytes, uint32_t block, const char *mkfs);

/* Mounts a file system of the device, or (`type` "ramfs" and the like) without one. */
void device_mount(struct device *v);
void stores_mount(const char *type, const char *options, char ret_dir[64]);
void device_unmount(struct device *v);

/* Skips the test when the kernel has nothing for it. */
void device_group(struct device *v);

/* In a child: joins the group. */
int device_join(const struct device *v);
void device_hold(const struct device *v);
void device_release(const struct device *v);

struct store_view {
    char state[16], problem[512], fix[256], io[96], note[256], task_result[512];
    uint64_t records, used, queued, writing, reading, errors;
    bool task_running;
    int task_status;
};

/* Of "space/pool/name". */
struct store_view daemon_store(struct daemon *d, const char *name);

static inline bool store_is(struct daemon *d, const char *name, const char *state)
{
    return strcmp(daemon_store(d, name).state, state) == 0;
}

/* Nothing waits to be written, nothing is being written. */
bool store_settled(struct daemon *d, const char *name);

/* Runs kvctl: its exit status, and what it says. */
int kvctl(struct daemon *d, char ret_text[8192], const char *arguments);

/* System calls that the calling process, and what it becomes, is denied. */
enum denied {
    DENY_IO_URING, /* answers EPERM */
    DENY_FLOCK,    /* answers 0 and does nothing */
};

int deny(enum denied what);

/* Of an answer "N s s s ...": how many s are `status`. */
unsigned count_statuses(const struct worker *w, int status);

#endif
