/* SPDX-License-Identifier: Apache-2.0 */
/* Two daemons in each other's way, and one after the other: what the dead one has left. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "harness.h"
#include "shm/layout.h"

TestSuite(restart, .init = harness_init, .fini = harness_fini);

static struct daemon d, second;
static struct worker a, b, e;
static const char *const pools[] = {"one/kv", "one/parts", "two/kv", NULL};

/* Replaces the text in all lines of a configuration that contain `where`. Both are equally long. */
static void edit_config(const struct daemon *of, const char *where, const char *from,
                        const char *to)
{
    char line[256], text[8192] = "";
    FILE *f = fopen(of->config, "r");
    unsigned changed = 0;

    cr_assert_eq(strlen(from), strlen(to));
    cr_assert_not_null(f);
    while (fgets(line, sizeof(line), f)) {
        char *at = strstr(line, where) ? strstr(line, from) : NULL;

        if (at)
            memcpy(at, to, strlen(to));
        changed += at != NULL;
        cr_assert_lt(strlen(text) + strlen(line), sizeof(text));
        strcat(text, line);
    }
    fclose(f);
    cr_assert_gt(changed, 0, "no %s in the configuration", from);
    f = fopen(of->config, "w");
    cr_assert_not_null(f);
    fputs(text, f);
    cr_assert_eq(fclose(f), 0);
}

/* ---- two at once */

static void first_goes_on(unsigned files)
{
    bystander_check(&e);
    cr_assert_eq(daemon_files(&d), files);
    cr_assert_eq(worker_n(&a, "check"), 8);
    cr_assert_eq(worker_n(&a, "publish 100 8"), 8);
    worker_do(&a, "current");
    worker_join(&b, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&b, "pin 100 8"), 8);
    cr_assert_eq(worker_n(&b, "check"), 8);
    worker_quit(&b);
    worker_quit(&a);
    bystander_stop(&e);
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}

static void start_first(void)
{
    daemon_up(&d, NULL, usual_pools);
    bystander_start(&e, &d);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 8"), 8);
    cr_assert_eq(worker_n(&a, "pin 0 8"), 8);
}

Test(restart, second_in_the_same_runtime_directory)
{
    char text[256];
    unsigned files;

    start_first();
    files = daemon_files(&d);
    daemon_prepare(&second, NULL, usual_pools);
    edit_config(&second, "runtime_dir", second.runtime, d.runtime); /* sockets of its own */
    snprintf(text, sizeof(text), "another kvd (pid %d) uses %s; it was left alone", (int)d.pid,
             d.runtime);
    daemon_fails(&second, 1, text);
    first_goes_on(files);
}

Test(restart, second_with_the_same_configuration)
{
    unsigned files;

    start_first();
    files = daemon_files(&d);
    daemon_prepare(&second, NULL, usual_pools);
    edit_config(&second, "", second.runtime, d.runtime);
    daemon_fails(&second, 1, "another kvd (pid ");
    first_goes_on(files);
}

Test(restart, second_on_the_same_socket)
{
    char text[256];
    unsigned files;

    start_first();
    files = daemon_files(&d);
    daemon_prepare(&second, NULL, usual_pools);
    edit_config(&second, "path =", second.runtime, d.runtime);
    snprintf(text, sizeof(text), "cannot listen on %s: another process listens there", d.writer);
    daemon_fails(&second, 1, text);
    cr_assert_eq(daemon_files(&second), 0, "it has left something in its own folder");
    first_goes_on(files);
}

/* The last of its sockets is taken; the others, which it had made, go again. */
Test(restart, second_on_one_socket_of_another)
{
    unsigned files;

    start_first();
    files = daemon_files(&d);
    daemon_prepare(&second, NULL, usual_pools);
    edit_config(&second, "admin.sock", second.runtime, d.runtime);
    daemon_fails(&second, 1, "another process listens there");
    cr_assert(access(second.writer, F_OK) < 0 && access(second.reader, F_OK) < 0);
    first_goes_on(files);
}

/* What has the name of a socket and is none is not removed. */
Test(restart, socket_path_is_a_file)
{
    char text[16] = "";
    FILE *f;

    daemon_prepare(&d, NULL, usual_pools);
    cr_assert_eq(mkdir(d.runtime, 0755), 0);
    f = fopen(d.reader, "w");
    cr_assert_not_null(f);
    fputs("letters", f);
    fclose(f);
    daemon_fails(&d, 1, "is not a socket");
    f = fopen(d.reader, "r");
    cr_assert_not_null(f, "it was removed");
    cr_assert_not_null(fgets(text, sizeof(text), f));
    fclose(f);
    cr_assert_str_eq(text, "letters");
    cr_assert_eq(unlink(d.reader), 0);
    daemon_start(&d);
    daemon_stop(&d);
}

/* ---- one after the other */

static bool is_socket(const char *path)
{
    struct stat st;

    return lstat(path, &st) == 0 && S_ISSOCK(st.st_mode);
}

/* The core, index, metadata, slots and data of three pools, and of each session that there was. */
Test(restart, stale_files_are_recognised)
{
    char text[160];
    unsigned files;

    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 8"), 8);
    daemon_kill(&d);
    files = daemon_files(&d);
    cr_assert_geq(files, 1 + 3 * 4 + 2);
    cr_assert(is_socket(d.writer) && is_socket(d.reader) && is_socket(d.admin));
    daemon_start(&d);
    snprintf(text, sizeof(text), "removed %u stale segments of an earlier run from %s", files,
             d.runtime);
    cr_assert(daemon_logged(&d, text), "it does not say: %s", text);
    worker_join(&b, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&b, "lookup 0 8"), 0);
    cr_assert_eq(worker_n(&b, "publish 0 8"), 8);
    worker_quit(&b);
    worker_quit(&a);
    daemon_stop(&d);
}

/* Of a pool that the new one does not have, too. */
Test(restart, stale_files_of_another_configuration)
{
    unsigned files;

    daemon_up(&d, NULL, usual_pools);
    files = daemon_files(&d);
    daemon_kill(&d);
    edit_config(&d, "[pool one/parts]", "one/parts", "one/other");
    daemon_start(&d);
    cr_assert_eq(daemon_files(&d), files);
    daemon_stop(&d);
}

/* A crash in the middle of making a file, a disk check, a curious person. */
Test(restart, stale_files_that_are_damaged)
{
    static const char *const names[] = {"kvd-index-0", "kvd-index-1", "kvd-meta-0", "kvd-core"};
    static const off_t sizes[] = {100, 0, 63, 64};
    char path[160];

    daemon_up(&d, NULL, usual_pools);
    daemon_kill(&d);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", d.runtime, names[i]);
        cr_assert_eq(truncate(path, sizes[i]), 0, "%s", path);
    }
    daemon_start(&d);
    worker_join(&a, d.writer, "one", "kv", "");
    cr_assert_eq(worker_n(&a, "publish 0 8"), 8);
    worker_quit(&a);
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}

static void make_file(const char *path, const void *bytes, size_t n)
{
    FILE *f = fopen(path, "w");

    cr_assert_not_null(f);
    cr_assert_eq(fwrite(bytes, 1, n, f), n);
    cr_assert_eq(fclose(f), 0);
}

static void has_bytes(const char *path, const void *bytes, size_t n)
{
    char got[512];
    FILE *f = fopen(path, "r");

    cr_assert_not_null(f, "%s is gone", path);
    cr_assert_leq(n, sizeof(got));
    cr_assert_eq(fread(got, 1, sizeof(got), f), n, "%s has another length", path);
    cr_assert_eq(memcmp(got, bytes, n), 0, "%s has changed", path);
    fclose(f);
}

/* Names prove nothing; and a link leads to somebody else's. */
Test(restart, foreign_files_are_left_alone)
{
    static const struct shm_header segment = {
        .magic = SHM_MAGIC, .version = SHM_VERSION, .kind = SHM_INDEX, .bytes = sizeof(segment)};
    char notes[160], empty[160], folder[160], fifo[160], link[160], target[160];
    struct stat st;

    daemon_up(&d, NULL, usual_pools);
    daemon_kill(&d);
    snprintf(notes, sizeof(notes), "%s/kvd-notes", d.runtime);
    snprintf(empty, sizeof(empty), "%s/kvd-index-empty", d.runtime);
    snprintf(folder, sizeof(folder), "%s/kvd-folder", d.runtime);
    snprintf(fifo, sizeof(fifo), "%s/kvd-fifo", d.runtime);
    snprintf(link, sizeof(link), "%s/kvd-link", d.runtime);
    snprintf(target, sizeof(target), "%s/elsewhere", d.dir);
    make_file(notes, "buy milk", 8);
    make_file(empty, "", 0);
    make_file(target, &segment, sizeof(segment));
    cr_assert_eq(mkdir(folder, 0755), 0);
    cr_assert_eq(mkfifo(fifo, 0600), 0);
    cr_assert_eq(symlink(target, link), 0);

    daemon_start(&d);
    cr_assert(daemon_logged(&d, "stale segments"));
    has_bytes(notes, "buy milk", 8);
    has_bytes(empty, "", 0);
    has_bytes(target, &segment, sizeof(segment));
    cr_assert(lstat(link, &st) == 0 && S_ISLNK(st.st_mode));
    cr_assert(lstat(fifo, &st) == 0 && S_ISFIFO(st.st_mode));
    cr_assert_eq(rmdir(folder), 0);
    cr_assert(unlink(notes) == 0 && unlink(empty) == 0 && unlink(link) == 0 && unlink(fifo) == 0);
    daemon_stop(&d);
}

/* ---- what workers see of it */

static void while_it_is_dead(void)
{
    cr_assert_eq(worker_n(&a, "lookup 0 16"), 16);
    cr_assert_eq(worker_n(&a, "check"), 8);
    cr_assert_eq(worker_n(&b, "pin 0 16"), 16, "pins taken without a daemon");
    cr_assert_eq(worker_n(&b, "check"), 16);
    cr_assert_eq(worker_n(&b, "release 4"), 4);
    cr_assert_eq(worker_try(&a, "publish 100 8"), -ENOTCONN);
    cr_assert_eq(worker_try(&a, "ping"), -ENOTCONN);
    cr_assert_eq(worker_try(&a, "refresh"), -ENOTCONN);
    cr_assert_eq(worker_n(&a, "lookup 0 16"), 16, "all the same after it was found out");
    cr_assert_eq(worker_n(&a, "check"), 8);
}

/* The old memory is retired, whether or not its reader has heard of it. */
static void before_the_refresh(void)
{
    cr_assert_eq(worker_n(&a, "lookup 0 16"), 0);
    cr_assert_eq(worker_n(&a, "pin 0 16"), 0);
    cr_assert_eq(worker_n(&a, "check"), 8);
    cr_assert_eq(worker_try(&a, "ping"), 0);
    cr_assert_eq(worker_try(&a, "current"), -ESTALE);
    cr_assert_eq(worker_try(&a, "publish 100 8"), -ESTALE);
    cr_assert_eq(worker_n(&a, "check"), 8);
}

static void after_the_refresh(void)
{
    worker_do(&a, "refresh");
    worker_do(&a, "current");
    cr_assert_eq(worker_n(&a, "lookup 0 16"), 0, "a new daemon's pools are empty");
    cr_assert_eq(worker_n(&a, "check"), 8, "pinned in the old one's");
    cr_assert_eq(worker_n(&a, "publish 8 16"), 16);
    cr_assert_eq(worker_n(&a, "pin 8 16"), 16);
    cr_assert_eq(worker_n(&a, "check"), 24, "both together");

    /* The new one evicts as it likes, and reaches nothing of the old. */
    for (int i = 1; i < 6; i++)
        worker_do(&a, "publish %d 48", i * 1000);
    cr_assert_eq(worker_n(&a, "check"), 24);
    cr_assert_eq(daemon_counts(&d, "one/kv").pinned, 16);
}

static void restart(bool killed)
{
    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "");
    worker_join(&b, d.reader, "one", "kv", "read");
    cr_assert_eq(worker_n(&a, "publish 0 16"), 16);
    cr_assert_eq(worker_n(&a, "pin 0 8"), 8);
    cr_assert_eq(worker_n(&b, "pin 0 4"), 4);
    cr_assert_eq(worker_n(&b, "release 0"), 0);
    if (killed) {
        daemon_kill(&d);
        while_it_is_dead();
    } else {
        daemon_stop(&d);
        cr_assert_eq(worker_n(&a, "lookup 0 16"), 0);
        cr_assert_eq(worker_n(&b, "pin 0 16"), 0);
        cr_assert_eq(worker_n(&a, "check"), 8);
        cr_assert_eq(worker_try(&a, "publish 100 8"), -ENOTCONN);
    }
    daemon_start(&d);
    before_the_refresh();
    after_the_refresh();

    /* A reader that has been silent all the time. */
    cr_assert_eq(worker_n(&b, "pin 8 16"), 0);
    worker_do(&b, "check");
    worker_do(&b, "refresh");
    cr_assert_eq(worker_n(&b, "pin 5000 48"), 48);
    worker_do(&b, "check");
    worker_do(&a, "release 0");
    worker_do(&b, "release 0");
    cr_assert_eq(daemon_counts(&d, "one/kv").pinned, 0);
    worker_quit(&a);
    worker_quit(&b);
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}

Test(restart, after_sigkill)
{
    restart(true);
}

Test(restart, after_sigterm)
{
    restart(false);
}

/* A reservation of the old one means nothing to the new one: not even within an engine, whose
 * ranks may have missed that their scheduler has begun anew. */
Test(restart, tickets_do_not_survive)
{
    daemon_up(&d, NULL, usual_pools);
    worker_join(&a, d.writer, "one", "kv", "token=engine");
    cr_assert_eq(worker_n(&a, "reserve 0 8"), 8);
    daemon_kill(&d);
    daemon_start(&d);
    worker_join(&b, d.writer, "one", "kv", "token=engine");
    cr_assert_eq(worker_n(&b, "reserve 50 8"), 8, "the same slots");
    worker_do(&a, "fill"); /* into the old one's memory */
    cr_assert_eq(worker_try(&a, "commit"), -ENOTCONN, "posted to the old one");
    cr_assert_eq(worker_try(&a, "commit"), -ESTALE);
    worker_do(&a, "refresh");
    worker_do(&a, "commit");
    cr_assert_str_eq(a.reply, "0 -116 -116 -116 -116 -116 -116 -116 -116");
    cr_assert_eq(daemon_counts(&d, "one/kv").live, 0);
    worker_do(&b, "fill");
    cr_assert_eq(worker_n(&b, "commit"), 8);
    cr_assert_eq(worker_n(&b, "pin 50 8"), 8);
    cr_assert_eq(worker_n(&b, "check"), 8);
    cr_assert_eq(worker_n(&b, "lookup 0 8"), 0);
    worker_quit(&a);
    worker_quit(&b);
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}

/* Killed again and again under load, at any moment: what is pinned keeps its bytes, all that is
 * hit is right. */
Test(restart, again_and_again, .timeout = 120)
{
    static struct worker w[3];

    daemon_up(&d, "quarantine = 5ms\n", usual_pools);
    for (int i = 0; i < 3; i++)
        worker_join(&w[i], d.writer, "one", i == 2 ? "parts" : "kv", "");
    for (int round = 0; round < 12; round++) {
        for (int i = 0; i < 3; i++)
            worker_do(&w[i], "churn %d %d", round * 3 + i, i == 2 ? 24 : 96);
        usleep((useconds_t)(round * 1237));
        daemon_kill(&d);
        daemon_start(&d);
        for (int i = 0; i < 3; i++) {
            worker_tell(&w[i], "check");
            cr_assert_eq(worker_answer(&w[i]), 0, "round %d: %s", round, w[i].reply);
            cr_assert_eq(worker_answer(&w[i]), 0, "round %d: %s", round, w[i].reply);
            worker_do(&w[i], "forget");
            worker_do(&w[i], "refresh");
            worker_do(&w[i], "check");
            worker_do(&w[i], "release 0");
        }
    }
    for (int i = 0; i < 3; i++)
        worker_quit(&w[i]);
    daemon_is_clean(&d, pools);
    daemon_stop(&d);
}
