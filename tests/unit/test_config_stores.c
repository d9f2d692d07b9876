/* SPDX-License-Identifier: Apache-2.0 */
/* [spill SPACE/POOL/NAME] and the keys of [daemon] that go with it. */
#include "config_world.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

Test(config, refuses_bad_values_of_stores)
{
    char *long_path = format(MINIMAL "[spill s/p/n]\nsize = 64M\npath=/%0191d\n", 1);

    assert_refused("spill", "path", "n", "not an absolute path");
    assert_error(long_path, 7, "longer than 191 bytes");
    assert_refused("spill", "size", "1025T", "out of range: 0 to 1024T");
    assert_refused("spill", "admission", "second-touch", "did you mean \"second_touch\"?");
    assert_refused("spill", "admission", "never", "it is all or second_touch");
    assert_refused("spill", "queue_depth", "0", "out of range: 1 to 256");
    assert_refused("spill", "queue_depth", "257", "out of range: 1 to 256");
    assert_refused("spill", "io", "uring", "it is auto, io_uring or threads, not \"uring\"");
    assert_refused("spill", "register_buffers", "true", "it is auto, yes or no");
    assert_refused("spill", "bandwidth", "fast", "\"fast\" is not a size such as 200M");
    assert_refused("daemon", "stop_flush", "soon", "\"soon\" is not a duration such as 30s");
    assert_refused("spill", "bandwidth", "1Gbit", "\"Gbit\" is not a unit");
    assert_refused("daemon", "fetch_deadline", "0", "out of range: 1ms to 10min");
    assert_refused("daemon", "stop_flush", "2h", "out of range: 0 to 1h");
    assert_refused("daemon", "digest_threads", "65", "out of range: 0 to 64");
    free(long_path);
}

Test(config, stores_need_their_pool)
{
    static const char keys[] = "path = " NOWHERE "/n\nsize = 64M\n";
    char *other = format(MINIMAL "[pool s/kvs]\nslot = 4K\nslots = 9\n[spill s/kv/n]\n%s", keys);
    char *space = format(MINIMAL "[spill t/p/n]\n%s", keys);
    char *long_names = format(MINIMAL "[spill %062d/%062d/%063d]\n%s", 1, 2, 3, keys);

    assert_error(other, 8, "there is no [pool s/kv]; did you mean \"s/kvs\"?");
    assert_error(space, 5, "there is no [pool t/p]; did you mean \"s/p\"?");
    assert_error(long_names, 5, "there is no [pool 000");
    free(other);
    free(space);
    free(long_names);
}

Test(config, stores_may_be_written_before_their_pool)
{
    struct config *c = must_load(STORE "[space t]\n[pool t/p]\nslot = 4K\nslots = 1\n" MINIMAL);

    cr_assert_str_eq(c->pools[c->stores[0].pool].name, "p");
    cr_assert_str_eq(c->spaces[c->pools[c->stores[0].pool].space].name, "s");
    config_free(c);
}

Test(config, a_store_of_a_broken_pool_is_not_blamed_for_it)
{
    assert_error("[space s]\n[pool s/p]\nslot = 5000\nslots = 9\n" STORE, 3, "not a multiple");
    assert_error("[space s]\n[pool s/p]\nslot = 8K\n" STORE, 2, "\"size\" (bytes) or \"slots\"");
    assert_error("[space s]\n[pool s/p]\nslot = 8X\nslots = 9\n" STORE, 3, "is not a unit");
}

Test(config, stores_need_a_path_and_a_size)
{
    assert_error(MINIMAL "[spill s/p/n]\nsize = 64M\n", 5, "\"path\" is missing");
    assert_error(MINIMAL "[spill s/p/n]\npath = " NOWHERE "/n\n", 5,
                 "it is required, since " NOWHERE "/n is no block device; fix: size =");
    assert_error(MINIMAL "[spill s/p/n]\npath = " NOWHERE "/n\nsize = 0\n", 7, "it is required");
}

Test(config, stores_have_room_for_16_objects)
{
    /* 2 MiB for superblocks and tables, and 16 slots of 4 MiB */
    static const char pool[] = "[space s]\n[pool s/p]\nslot = 4M\nslots = 8\n"
                               "[spill s/p/n]\npath = " NOWHERE "/n\nsize =";
    char *fits = format("%s 66M\n", pool), *small = format("%s 67584K\n", pool);
    char *no_slot = format("%s 3M\n", pool);

    config_free(must_load(fits));
    small[strlen(small) - 3] = '3'; /* 67583K */
    assert_error(small, 7, "too small for 16 objects of 4194304 bytes; fix: at least 66M");
    assert_error(no_slot, 7, "less than one slot of the pool (4194304 bytes); fix: at least 66M");
    free(fits);
    free(small);
    free(no_slot);
}

Test(config, warns_of_stores_that_are_of_little_use)
{
    static const char pool[] = "[space s]\n[pool s/p]\nslot = 4K\nsize = 100M\n";
    char *alone = format("%s" STORE, pool);
    char *two = format("%s" STORE "[spill s/p/m]\npath = " NOWHERE "/m\nsize = 36M\n", pool);
    char *few = format("%s" STORE "[spill s/p/m]\npath = " NOWHERE "/m\nsize = 35M\n", pool);

    assert_problem(alone, true, 7, "less than the pool itself (100 MiB): of little use");
    config_free(must_load(two)); /* together they have the pool's size */
    assert_problem(few, true, 7, "of little use");
    assert_problem(MINIMAL STORE "wear = 4095\n", true, 8, "nothing will be written");
    assert_problem(MINIMAL STORE "io = threads\nregister_buffers = yes\n", true, 9,
                   "only io_uring registers buffers");
    free(alone);
    free(two);
    free(few);
}

Test(config, stores_of_one_path_are_refused)
{
    assert_error(MINIMAL STORE "[spill s/p/m]\nsize = 64M\npath = " NOWHERE "/n\n", 10,
                 "path: [spill s/p/n] has this path already");
}

Test(config, digest_threads)
{
    struct config_daemon d = {.digest_threads = 0};

    cr_assert_eq(config_digest_threads(&d, 0), 1);
    cr_assert_eq(config_digest_threads(&d, 1), 1);
    cr_assert_eq(config_digest_threads(&d, 64), 2);
    d.digest_threads = 5;
    cr_assert_eq(config_digest_threads(&d, 1), 5);
}

/* Two stores, whose paths are below the test's folder. */
static char *two_stores(const char *a, const char *b)
{
    return format(MINIMAL "[spill s/p/a]\nsize = 4M\npath = %s/%s\n"
                          "[spill s/p/b]\nsize = 4M\npath = %s/%s\n",
                  config_dir, a, config_dir, b);
}

static void assert_one_file(const char *a, const char *b)
{
    char *text = two_stores(a, b);

    assert_error(text, 10, " of [spill s/p/a]");
    free(text);
}

static void assert_two_files(const char *a, const char *b)
{
    char *text = two_stores(a, b);

    config_free(must_load(text));
    free(text);
}

Test(config_files, one_store_of_two_names_is_found_out, .init = make_dir, .fini = remove_dir)
{
    char *there = format("%s/there", config_dir), *hard = format("%s/hard", config_dir);
    char *soft = format("%s/soft", config_dir), *folder = format("%s/folder", config_dir);

    put("there", "");
    put("other", "");
    cr_assert_eq(link(there, hard), 0);
    cr_assert_eq(symlink("there", soft), 0);
    cr_assert_eq(symlink("conf.d", folder), 0);
    assert_one_file("there", "hard");
    assert_one_file("there", "soft");
    assert_one_file("there", "conf.d/../there");
    assert_one_file("not-yet", "conf.d/../not-yet");
    assert_one_file("conf.d/not-yet", "folder/not-yet");
    assert_two_files("there", "other");
    assert_two_files("there", "not-yet");
    assert_two_files("not-yet", "nor-this");
    assert_two_files("not-yet", "conf.d/not-yet");
    free(there);
    free(hard);
    free(soft);
    free(folder);
}

Test(config_files, a_store_is_a_file_or_a_block_device, .init = make_dir, .fini = remove_dir)
{
    char *folder = format(MINIMAL "[spill s/p/n]\npath = %s\nsize = 4M\n", config_dir);
    char *fifo = format("%s/fifo", config_dir), *named, *file;

    cr_assert_eq(mkfifo(fifo, 0600), 0);
    put("file", "");
    named = format(MINIMAL "[spill s/p/n]\npath = %s\nsize = 4M\n", fifo);
    file = format(MINIMAL "[spill s/p/n]\npath = %s/file\n", config_dir);
    assert_error(folder, 6, "is a directory; fix: path = ");
    assert_error(named, 6, "is neither a regular file nor a block device");
    assert_error(MINIMAL "[spill s/p/n]\npath = /dev/null\nsize = 4M\n", 6,
                 "is a character device; of an NVMe drive take the namespace");
    assert_error(file, 5, "size: it is required, since ");
    free(folder);
    free(fifo);
    free(named);
    free(file);
}

/* Needs a block device in /dev or the right to make one; a container may have neither. */
Test(config_files, a_block_device_needs_no_size, .init = make_dir, .fini = remove_dir)
{
    char *node = format("%s/node", config_dir), *text;
    struct config *c;

    text = format(MINIMAL "[spill s/p/n]\npath = %s\n", node);
    if (mknod(node, S_IFBLK | 0600, makedev(7, 250)) < 0) {
        cr_assert(errno == EPERM || errno == EACCES, "%s", strerror(errno));
    } else {
        c = must_load(text);
        cr_assert_eq(c->stores[0].size, 0);
        config_free(c);
    }
    free(text);
    free(node);
}
