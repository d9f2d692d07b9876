/* SPDX-License-Identifier: Apache-2.0 */
/* Needs KVD_SOURCE_DIR, the root of the source tree: documentation is tested against the parser. */
#include "config_world.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <syslog.h>
#include <unistd.h>

/* ---- defaults and values */

Test(config, fills_in_defaults)
{
    struct config *c = must_load(MINIMAL);
    const struct config_daemon *d = &c->daemon;

    cr_assert_str_eq(d->runtime_dir, "/run/kvd");
    cr_assert_str_eq(d->hugetlbfs, "");
    cr_assert_eq(d->hugepages, CONFIG_HUGEPAGES_TRY);
    cr_assert_eq(d->page_size, 0);
    cr_assert_eq(d->populate_threads, 0);
    cr_assert_eq(d->engine_linger_ns, 30 * SECOND);
    cr_assert_eq(d->quarantine_ns, 30 * SECOND);
    cr_assert_eq(d->core_spin_ns, 20000);
    cr_assert_eq(d->max_frame, MIB);
    cr_assert_eq(d->max_inline, 256 * KIB);
    cr_assert_eq(d->max_connections, 4096);
    cr_assert_eq(d->max_sessions, 1024);
    cr_assert_eq(d->ring_entries_max, 4096);
    cr_assert_eq(d->log_level, LOG_INFO);
    cr_assert_eq(d->log_target, CONFIG_LOG_AUTO);
    cr_assert_eq(d->fetch_deadline_ns, 2 * SECOND);
    cr_assert_eq(d->fetch_hold_ns, 5 * SECOND);
    cr_assert_eq(d->spill_start_ns, 5 * SECOND);
    cr_assert_eq(d->stop_flush_ns, 10 * SECOND);
    cr_assert_eq(d->digest_threads, 0);
    cr_assert_eq(c->store_count, 0);

    cr_assert_eq(c->space_count, 1);
    cr_assert_str_eq(c->spaces[0].name, "s");
    cr_assert_eq(c->spaces[0].scheme, CONFIG_SCHEME_OPAQUE);
    cr_assert_eq(c->spaces[0].block_tokens, 16);
    cr_assert_eq(c->spaces[0].first_parent.len, 0);
    cr_assert_eq(c->spaces[0].max_pinned, 0);

    cr_assert_eq(c->pool_count, 1);
    cr_assert_str_eq(c->pools[0].name, "p");
    cr_assert_eq(c->pools[0].space, 0);
    cr_assert_eq(c->pools[0].parts, 1);
    cr_assert_eq(c->pools[0].slot_bytes, 4096);
    cr_assert_eq(c->pools[0].part_bytes, 4096);
    cr_assert_eq(c->pools[0].slots, 200);
    cr_assert_eq(c->pools[0].size, 200 * 4096);
    cr_assert_eq(c->pools[0].chunk, GIB);
    cr_assert_eq(c->pools[0].low_water, 2);
    cr_assert_eq(c->pools[0].high_water, 4);
    cr_assert_eq(c->pools[0].policy, CONFIG_POLICY_LRU);
    config_free(c);
    config_free(NULL);
}

Test(config, two_sockets_without_any)
{
    struct config *c = must_load("[daemon]\nruntime_dir = /tmp/x\nmax_connections = 9\n" MINIMAL);

    cr_assert_eq(c->socket_count, 2);
    cr_assert_str_eq(c->sockets[0].path, "/tmp/x/kvd.sock");
    cr_assert_eq(c->sockets[0].role, CONFIG_ROLE_WRITER);
    cr_assert_eq(c->sockets[0].mode, 0660);
    cr_assert_str_eq(c->sockets[1].path, "/tmp/x/kvd-admin.sock");
    cr_assert_eq(c->sockets[1].role, CONFIG_ROLE_ADMIN);
    cr_assert_eq(c->sockets[1].mode, 0600);
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(c->sockets[i].max_connections, 9);
        cr_assert_eq(c->sockets[i].uids.count, 0);
        cr_assert(config_socket_serves(&c->sockets[i], "s"));
    }
    config_free(c);
}

static const char all_keys[] = "[daemon]\n"
                               "runtime_dir = /tmp/kvd\n"
                               "hugepages = require\n"
                               "hugetlbfs = /mnt/huge\n"
                               "page_size = 1G\n"
                               "populate_threads = 3\n"
                               "engine_linger = 1min\n"
                               "quarantine = 500ms\n"
                               "max_connections = 100\n"
                               "max_sessions = 50\n"
                               "max_frame = 2M\n"
                               "max_inline = 1M\n"
                               "ring_entries_max = 512\n"
                               "core_spin = 1.5us\n"
                               "log_level = debug\n"
                               "log_target = journal\n"
                               "fetch_deadline = 1.5s\nfetch_hold = 0\nspill_start = 1min\n"
                               "stop_flush = 1h\ndigest_threads = 4\n"
                               "[space a]\n"
                               "scheme = vllm-xxhash-cbor\n"
                               "seed = a = b, c: d\n"
                               "block_tokens = 784\n"
                               "vector_key = 000102030405060708090a0B0C0D0E0f\n"
                               "model = M\nrevision = R\ndtype = D\ngeometry = G g\n"
                               "max_pinned = 3G\nmax_reserved = 77\n"
                               "[space b]\n"
                               "first_parent = ff00\n"
                               "[pool b/kv]\n"
                               "slot = 1M\nsize = 1.5G\nparts = 4\nchunk = 64M\n"
                               "low_water = 10\nhigh_water = 2.5%\npolicy = lru\n"
                               "[pool a/states]\n"
                               "slot = 8K\nslots = 7\n"
                               "[socket one]\n"
                               "path = /tmp/one\nrole = reader\nspaces = a, b* ,[a-z]?\n"
                               "mode = 600\ngroup = staff\nuids = 0, 1000\nmax_connections = 3\n"
                               "[tenant *]\nmax_resident = 1M\n"
                               "[tenant 007]\nmax_reserved = 4\n"
                               "[spill a/states/x]\npath = " NOWHERE "/a b\nsize = 1T\n"
                               "[spill b/kv/y.2]\npath = " NOWHERE "/y\nsize = 2G\n"
                               "admission = second_touch\nbandwidth = 500M\nwear = 1.5T\n"
                               "queue_depth = 256\nio = io_uring\nregister_buffers = yes\n";

/* all_keys with one warning: a pattern that matches nothing. */
static struct config *load_all_keys(void)
{
    struct config *c = NULL;
    struct problems p;

    cr_assert_eq(load(all_keys, &c, &p), 0, "%s", all_of(&p));
    cr_assert_eq(p.n, 1, "%s", all_of(&p));
    return c;
}

Test(config, takes_every_key_of_daemon)
{
    struct config *c = load_all_keys();

    cr_assert_str_eq(c->daemon.hugetlbfs, "/mnt/huge");
    cr_assert_eq(c->daemon.hugepages, CONFIG_HUGEPAGES_REQUIRE);
    cr_assert_eq(c->daemon.page_size, GIB);
    cr_assert_eq(c->daemon.populate_threads, 3);
    cr_assert_eq(c->daemon.engine_linger_ns, 60 * SECOND);
    cr_assert_eq(c->daemon.quarantine_ns, SECOND / 2);
    cr_assert_eq(c->daemon.max_connections, 100);
    cr_assert_eq(c->daemon.max_sessions, 50);
    cr_assert_eq(c->daemon.max_frame, 2 * MIB);
    cr_assert_eq(c->daemon.max_inline, MIB);
    cr_assert_eq(c->daemon.ring_entries_max, 512);
    cr_assert_eq(c->daemon.core_spin_ns, 1500);
    cr_assert_eq(c->daemon.log_level, LOG_DEBUG);
    cr_assert_eq(c->daemon.log_target, CONFIG_LOG_JOURNAL);
    cr_assert_eq(c->daemon.fetch_deadline_ns, 3 * SECOND / 2);
    cr_assert_eq(c->daemon.fetch_hold_ns, 0);
    cr_assert_eq(c->daemon.spill_start_ns, 60 * SECOND);
    cr_assert_eq(c->daemon.stop_flush_ns, 3600 * SECOND);
    cr_assert_eq(c->daemon.digest_threads, 4);
    config_free(c);
}

Test(config, takes_every_key_of_stores)
{
    struct config *c = load_all_keys();
    const struct config_store *x = &c->stores[0], *y = &c->stores[1];

    cr_assert_eq(c->store_count, 2);
    cr_assert_str_eq(x->name, "x");
    cr_assert_str_eq(x->path, NOWHERE "/a b");
    cr_assert_eq(x->pool, 1, "[pool a/states] is the second one");
    cr_assert_eq(x->size, TIB);
    cr_assert_eq(x->admission, CONFIG_ADMIT_ALL);
    cr_assert_eq(x->bandwidth, 0);
    cr_assert_eq(x->wear, 0);
    cr_assert_eq(x->queue_depth, 8);
    cr_assert_eq(x->io, CONFIG_IO_AUTO);
    cr_assert_eq(x->register_buffers, CONFIG_REGISTER_AUTO);

    cr_assert_str_eq(y->name, "y.2");
    cr_assert_eq(y->pool, 0);
    cr_assert_eq(y->admission, CONFIG_ADMIT_SECOND_TOUCH);
    cr_assert_eq(y->bandwidth, 500 * MIB);
    cr_assert_eq(y->wear, 3 * TIB / 2);
    cr_assert_eq(y->queue_depth, 256);
    cr_assert_eq(y->io, CONFIG_IO_URING);
    cr_assert_eq(y->register_buffers, CONFIG_REGISTER_YES);
    config_free(c);
}

Test(config, takes_every_key_of_spaces_and_pools)
{
    struct config *c = load_all_keys();
    const struct config_pool *p = &c->pools[0];

    cr_assert_eq(c->space_count, 2);
    cr_assert_eq(c->spaces[0].scheme, CONFIG_SCHEME_VLLM_XXHASH_CBOR);
    cr_assert_str_eq(config_scheme_name(c->spaces[0].scheme), "vllm-xxhash-cbor");
    cr_assert_str_eq(c->spaces[0].seed, "a = b, c: d");
    cr_assert_eq(c->spaces[0].block_tokens, 784);
    cr_assert_eq(c->spaces[0].vector_key.len, 16);
    for (int i = 0; i < 16; i++)
        cr_assert_eq(c->spaces[0].vector_key.bytes[i], i);
    cr_assert_eq(c->spaces[0].max_pinned, 3 * GIB);
    cr_assert_eq(c->spaces[0].max_reserved, 77);
    cr_assert_eq(c->spaces[1].first_parent.len, 2);
    cr_assert_eq(c->spaces[1].first_parent.bytes[0], 0xff);
    cr_assert_eq(c->spaces[1].first_parent.bytes[1], 0);

    cr_assert_eq(c->pool_count, 2);
    cr_assert_eq(p->space, 1);
    cr_assert_eq(p->slot_bytes, MIB);
    cr_assert_eq(p->part_bytes, MIB / 4);
    cr_assert_eq(p->parts, 4);
    cr_assert_eq(p->slots, 1536);
    cr_assert_eq(p->size, 1536 * MIB);
    cr_assert_eq(p->chunk, 64 * MIB);
    cr_assert_eq(p->low_water, 10);
    cr_assert_eq(p->high_water, 38); /* 2.5 % of 1,536 is 38.4 */
    cr_assert_eq(c->pools[1].space, 0);
    cr_assert_eq(c->pools[1].slots, 7);
    cr_assert_eq(c->pools[1].size, 7 * 8192);
    config_free(c);
}

Test(config, takes_every_key_of_sockets_and_tenants)
{
    struct config *c = load_all_keys();
    const struct config_socket *s = &c->sockets[0];

    cr_assert_eq(c->socket_count, 1);
    cr_assert_str_eq(s->name, "one");
    cr_assert_str_eq(s->path, "/tmp/one");
    cr_assert_eq(s->role, CONFIG_ROLE_READER);
    cr_assert_eq(s->mode, 0600);
    cr_assert_str_eq(s->group, "staff");
    cr_assert_eq(s->max_connections, 3);
    cr_assert_eq(s->spaces.count, 3);
    cr_assert_str_eq(s->spaces.list[1], "b*");
    cr_assert_eq(s->uids.count, 2);
    cr_assert(config_socket_admits(s, 0));
    cr_assert(config_socket_admits(s, 1000));
    cr_assert(!config_socket_admits(s, 1001));
    cr_assert(config_socket_serves(s, "a"));
    cr_assert(config_socket_serves(s, "bcd"));
    cr_assert(config_socket_serves(s, "y1"));
    cr_assert(!config_socket_serves(s, "A"));
    cr_assert(!config_socket_serves(s, "y12"));

    cr_assert_eq(config_tenant(c, 7)->max_reserved, 4);
    cr_assert_eq(config_tenant(c, 7)->max_resident, MIB, "as in [tenant *]");
    cr_assert_eq(config_tenant(c, 8)->max_reserved, 0);
    cr_assert_eq(config_tenant(c, 8)->max_resident, MIB);
    config_free(c);
}

struct good {
    const char *text;
    uint64_t value;
};

struct bad {
    const char *text, *says;
};

Test(config, sizes)
{
    static const struct good good[] = {
        {"0", 0},
        {"1B", 1},
        {"4096", 4096},
        {"64K", 64 * KIB},
        {"64k", 64 * KIB},
        {"2M", 2 * MIB},
        {"1.5G", 3 * GIB / 2},
        {"4GiB", 4 * GIB},
        {"4 gib", 4 * GIB},
        {"0.5T", TIB / 2},
        {"0.000001M", 1},
        {"1.999999K", 2047},
        {"8388607T", 8388607 * TIB},
        {"9223372036854775807", INT64_MAX},
    };
    static const struct bad bad[] = {
        {"", "is not a size such as 200M"},
        {"x", "is not a size such as 200M"},
        {"-1", "is not a size such as 200M"},
        {"+1", "is not a size such as 200M"},
        {".5G", "is not a size such as 200M"},
        {"1.G", "digits are missing"},
        {"1.0000000G", "more than six digits"},
        {"1X", "\"X\" is not a unit"},
        {"1KB", "\"KB\" is not a unit"},
        {"1 2", "is not a unit"},
        {"0x10", "is not a unit"},
        {"1K K", "is not a unit"},
        {"18446744073709551616", "too large"},
        {"16777216T", "too large"},
        {"18446744073709551615.5K", "too large"},
        {"9223372036854775808", "out of range: 0 to"},
        {"\"1K\"", "quotes"},
        {"1K # one", "begins with ;"},
    };

    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        struct config *c = must_load(with("space", "max_pinned", good[i].text));

        cr_assert_eq(c->spaces[0].max_pinned, good[i].value, "%s", good[i].text);
        config_free(c);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_refused("space", "max_pinned", bad[i].text, bad[i].says);
}

Test(config, durations)
{
    static const struct good good[] = {
        {"0", 0},
        {"20us", 20000},
        {"7ns", 7},
        {"500ms", SECOND / 2},
        {"1.5s", 1500 * (SECOND / 1000)},
        {"2min", 120 * SECOND},
        {"1h", 3600 * SECOND},
        {"3 s", 3 * SECOND},
    };
    static const struct bad bad[] = {
        {"30", "the unit is missing"},
        {"30S", "\"S\" is not a unit"},
        {"30 seconds", "\"seconds\" is not a unit"},
        {"1.1h", "out of range: 0 to 1h"},
        {"99999999999999h", "too large"},
        {"", "is not a duration such as 30s"},
    };

    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        struct config *c = must_load(with("daemon", "quarantine", good[i].text));

        cr_assert_eq(c->daemon.quarantine_ns, good[i].value, "%s", good[i].text);
        config_free(c);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_refused("daemon", "quarantine", bad[i].text, bad[i].says);
}

Test(config, refuses_bad_values_of_daemon)
{
    char *long_path = format("/%0107d", 1);

    assert_refused("daemon", "runtime_dir", "run/kvd", "not an absolute path");
    assert_refused("daemon", "runtime_dir", "", "not an absolute path");
    assert_refused("daemon", "runtime_dir", long_path, "longer than 107 bytes");
    assert_refused("daemon", "hugepages", "of", "did you mean \"off\"?");
    assert_refused("daemon", "hugepages", "TRY", "did you mean \"try\"?");
    assert_refused("daemon", "hugepages", "perhaps", "it is off, try or require, not \"perhaps\"");
    assert_refused("daemon", "hugetlbfs", "huge", "not an absolute path");
    assert_refused("daemon", "page_size", "3M", "not a power of two");
    assert_refused("daemon", "page_size", "4K", "out of range: 64K to 16G");
    assert_refused("daemon", "populate_threads", "0", "out of range: 1 to 64");
    assert_refused("daemon", "populate_threads", "1.5", "not a whole number");
    assert_refused("daemon", "ring_entries_max", "100", "not a power of two");
    assert_refused("daemon", "ring_entries_max", "32768", "out of range: 16 to 16384");
    assert_refused("daemon", "core_spin", "1s", "out of range: 0 to 100ms");
    assert_refused("daemon", "log_level", "fatal",
                   "it is error, warning, notice, info or debug, not");
    assert_refused("daemon", "max_sessions", "0", "out of range: 1 to 65536");
    free(long_path);
}

Test(config, refuses_bad_values_of_spaces_and_pools)
{
    assert_refused("space", "scheme", "vllm",
                   "it is opaque, vllm-sha256-cbor, vllm-xxhash-cbor or sglang, not");
    assert_refused("space", "scheme", "vllm-sha256-cbr", "did you mean \"vllm-sha256-cbor\"?");
    assert_refused("space", "first_parent", "abc", "3 hexadecimal digits");
    assert_refused("space", "first_parent", "zz", "not hexadecimal");
    assert_refused("space", "first_parent",
                   "000102030405060708090a0b0c0d0e0f000102030405060708090a0b0c0d0e0f00",
                   "66 hexadecimal digits");
    assert_refused("space", "block_tokens", "0", "out of range");
    assert_refused("space", "model", "a;b", "must not contain");
    assert_refused("pool", "parts", "65", "out of range: 1 to 64");
    assert_refused("pool", "chunk", "2T", "out of range: 4K to 1T");
    assert_refused("pool", "low_water", "101%", "more than all");
    assert_refused("pool", "low_water", "1%%", "neither slots nor a percentage");
    assert_refused("pool", "low_water", "%", "is not a number");
    assert_refused("pool", "low_water", "1.5", "not a whole number");
    assert_refused("pool", "policy", "arc", "it is lru, not \"arc\"");
}

Test(config, refuses_bad_values_of_sockets_and_tenants)
{
    assert_refused("socket", "path", "kvd.sock", "not an absolute path");
    assert_refused("socket", "mode", "0888", "three octal digits");
    assert_refused("socket", "mode", "1777", "three octal digits");
    assert_refused("socket", "role", "root", "it is reader, writer or admin");
    assert_refused("socket", "uids", "root", "not the number of a user");
    assert_refused("socket", "uids", "1 2", "not the number of a user");
    assert_refused("socket", "uids", "4294967295", "not the number of a user");
    assert_refused("socket", "uids",
                   "1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,"
                   "7,8,9,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9,1,2",
                   "more than 64");
    assert_refused("socket", "group", "a b", "not a group");
    assert_refused("socket", "spaces", "s,,s", "neither the name of a space nor a pattern");
    assert_refused("socket", "spaces", "s s", "neither the name of a space nor a pattern");
    assert_refused("socket", "spaces", "s,s,s,s,s,s,s,s,s,s,s,s,s,s,s,s,s", "more than 16");
    assert_refused("tenant", "max_resident", "no", "is not a size such as 200M");
}

/* ---- lines */

Test(config, reads_what_editors_write)
{
    static const char *const texts[] = {
        "\xef\xbb\xbf[space s]\n[pool s/p]\nslot = 4K\nslots = 200\n",
        "[space s]\r\n[pool s/p]\r\nslot = 4K\r\nslots = 200\r\n",
        "[space s]\n[pool s/p]\nslot = 4K\nslots = 200",
        "  [space s]\n\t[pool  s/p ]  ; here\n  slot=4K\n  slots : 200 ; there\n",
        "\n# c\n; c\n  # c = c\n[space s] # c\n[pool s/p]\nslots = 200\nslot = 4K\n\n",
        "[ space s ]\n[pool s/p]\nslot = 4K\nslots = 200\n[daemon]\n",
    };
    struct config *expected = must_load(MINIMAL);

    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        struct config *c = must_load(texts[i]);

        cr_assert_eq(memcmp(c, expected, sizeof(*c)), 0, "%s", texts[i]);
        config_free(c);
    }
    config_free(expected);
}

Test(config, refuses_what_is_no_line)
{
    assert_error(MINIMAL "what is this\n", 5, "neither KEY = VALUE");
    assert_error(MINIMAL "what is this", 5, "neither KEY = VALUE");
    assert_error("what\n" MINIMAL, 1, "neither KEY = VALUE");
    assert_error("slot = 4K\n" MINIMAL, 1, "\"slot\" before the first [SECTION]");
    assert_error(MINIMAL "= 4K\n", 5, "unknown key \"\"");
    assert_error(MINIMAL "[daemon\n", 5, "the ] of the section is missing");
    assert_error(MINIMAL "[daemon] log_level = info\n", 5, "something follows the ]");
    assert_error(MINIMAL "key ; = 4K\n", 5, "neither KEY = VALUE");
}

Test(config, refuses_lines_that_are_too_long)
{
    char *fits = format(MINIMAL "[daemon]\nlog_level = %0*d\n", 198 - 12, 0);
    char *cut = format(MINIMAL "[daemon]\nlog_level = %0*d\nlog_level = debug\n", 199 - 12, 0);
    char *comment = format(MINIMAL "[daemon]\n# %0*d log_level = debug\n", 5000, 0);

    assert_error(fits, 6, "it is error, warning, notice");
    assert_error(cut, 6, "the line is longer than 198 bytes");
    assert_error(comment, 6, "the line is longer than 198 bytes");
    free(fits);
    free(cut);
    free(comment);
}

Test(config, refuses_zero_bytes)
{
    static const char text[] = MINIMAL "[daemon]\nlog_level = info\0 = x\n";
    struct problems p;
    struct config *c;

    cr_assert_eq(load_bytes(text, sizeof(text) - 1, &c, &p), -EINVAL);
    cr_assert_eq(p.n, 1);
    cr_assert_eq(p.list[0].line, 6);
    cr_assert_not_null(strstr(p.list[0].text, "zero byte"));
}

Test(config, problems_are_printable)
{
    struct problems p;
    struct config *c;

    cr_assert_eq(load(MINIMAL "a\033[2Jb = 1\n[\033c]\n", &c, &p), -EINVAL);
    cr_assert_eq(p.n, 2);
    for (unsigned i = 0; i < p.n; i++)
        cr_assert_null(strchr(p.list[i].text, '\033'));
}

/* ---- sections and keys */

Test(config, names_the_nearest_key)
{
    assert_error(MINIMAL "[daemon]\nhugepage = try\n", 6,
                 "unknown key \"hugepage\" in [daemon]; did you mean \"hugepages\"?");
    assert_error(MINIMAL "[daemon]\nLogLevel = info\n", 6, "did you mean \"log_level\"?");
    assert_error(MINIMAL "slotz = 1\n", 5, "did you mean \"slot\"?");
    assert_error(MINIMAL "[daemon]\nslot = 4K\n", 6,
                 "\"slot\" belongs in [pool SPACE/NAME], not in [daemon]");
    assert_error(MINIMAL "[tenant 1]\nweight = 4\n", 6,
                 "unknown key \"weight\" in [tenant NUMBER]; there is max_resident, max_reserved");
    assert_error(MINIMAL "[deamon]\nlog_level = x\nanything = y\n", 5,
                 "unknown section [deamon]; did you mean \"daemon\"?");
    assert_error(MINIMAL "[cache]\n", 5, "there is daemon, space, pool, socket, tenant, spill");
    assert_error(MINIMAL "wear = 1G\n", 5,
                 "\"wear\" belongs in [spill SPACE/POOL/NAME], not in [pool SPACE/NAME]");
    assert_error(MINIMAL "[]\n", 5, "unknown section []");
    assert_error("[space llama]\n[pool lama/p]\nslot = 4K\nslots = 1\n"
                 "[pool llama/p]\nslot = 4K\nslots = 1\n",
                 2, "there is no [space lama]; did you mean \"llama\"?");
}

Test(config, checks_names)
{
    char *longest = format("[space %063d]\n[pool %063d/%063d]\nslot = 4K\nslots = 1\n", 1, 1, 2);
    char *too_long = format(MINIMAL "[socket %064d]\n", 1);
    struct config *c = must_load(longest);

    cr_assert_eq(strlen(c->spaces[0].name), 63);
    cr_assert_eq(strlen(c->pools[0].name), 63);
    cr_assert_eq(c->pools[0].name[62], '2');
    config_free(c);
    assert_error(too_long, 5, "is not a name");
    assert_error(MINIMAL "[space]\n", 5, "the name is missing: [space NAME]");
    assert_error(MINIMAL "[space ]\n", 5, "the name is missing: [space NAME]");
    assert_error(MINIMAL "[space a b]\n", 5, "\"a b\" is not a name");
    assert_error(MINIMAL "[space ..]\n", 5, "\"..\" is not a name");
    assert_error(MINIMAL "[space a/b]\n", 5, "\"a/b\" is not a name");
    assert_error(MINIMAL "[space \xc3\xa9]\n", 5, "is not a name");
    assert_error(MINIMAL "[pool p]\n", 5, "does not say of which space");
    assert_error(MINIMAL "[pool s/]\n", 5, "\"\" is not a name");
    assert_error(MINIMAL "[pool /p]\n", 5, "\"\" is not a name");
    assert_error(MINIMAL "[pool s/p/q]\n", 5, "\"p/q\" is not a name");
    assert_error(MINIMAL "[spill n]\n", 5, "does not say of which space and pool");
    assert_error(MINIMAL "[spill s/p]\n", 5, "does not say of which space and pool");
    assert_error(MINIMAL "[spill s/p/]\n", 5, "\"\" is not a name");
    assert_error(MINIMAL "[spill s//n]\n", 5, "\"\" is not a name");
    assert_error(MINIMAL "[spill /p/n]\n", 5, "\"\" is not a name");
    assert_error(MINIMAL "[spill s/p/n/o]\n", 5, "\"n/o\" is not a name");
    assert_error(MINIMAL "[daemon x]\n", 5, "[daemon] takes no name");
    assert_error(MINIMAL "[tenant x]\n", 5, "a tenant is a number up to 4294967295, or *");
    assert_error(MINIMAL "[tenant 4294967296]\n", 5, "a tenant is a number");
    assert_error(MINIMAL "[tenant 1x]\n", 5, "a tenant is a number");
    free(longest);
    free(too_long);
}

Test(config, refuses_duplicates_in_one_file)
{
    assert_error(MINIMAL "[space s]\n", 5, "[space s] was already begun in line 1");
    assert_error(MINIMAL "[daemon]\n[daemon]\n", 6, "[daemon] was already begun in line 5");
    assert_error(MINIMAL "[tenant 7]\n[tenant 07]\n", 6, "already begun in line 5");
    assert_error(MINIMAL "[tenant 0]\n[tenant 000]\n", 6, "already begun in line 5");
    assert_error(MINIMAL "slots = 200\n", 5, "slots: it was already set in line 4");
    assert_error(MINIMAL "size = 1M\n", 5, "\"slots\" was set in line 4; give one of the two");
    assert_error("[space s]\nscheme = vllm-sha256-cbor\nseed = x\nfirst_parent = 00\n"
                 "[pool s/p]\nslot = 4K\nslots = 1\n",
                 4, "\"seed\" was set in line 3; give one of the two");
    assert_error(MINIMAL "[socket a]\npath = /tmp/x\n[socket b]\npath = /tmp/x\n", 8,
                 "[socket a] has the same one");
}

Test(config, reports_everything_at_once)
{
    static const char text[] = "nonsense\n"
                               "[deamon]\nx = y\n"
                               "[daemon]\nlog_lvl = info\nmax_frame = 1\nmore nonsense\n"
                               "[space s]\nscheme = x\n"
                               "[pool s/p]\nslot = 8K\n"
                               "[pool t/p]\n";
    struct problems p;
    struct config *c;
    FILE *f;

    cr_assert_eq(load(text, &c, &p), -EINVAL);
    cr_assert_eq(p.errors, 9, "%s", all_of(&p));
    cr_assert_eq(p.list[0].line, 1);
    cr_assert_eq(p.list[1].line, 2);
    cr_assert_eq(p.list[2].line, 5);
    cr_assert_eq(p.list[3].line, 6);
    cr_assert_eq(p.list[4].line, 7);
    cr_assert_eq(p.list[5].line, 9);
    cr_assert_not_null(strstr(p.list[6].text, "\"size\" (bytes) or \"slots\" (number) is missing"));
    cr_assert_not_null(strstr(p.list[7].text, "there is no [space t]"));
    cr_assert_not_null(strstr(p.list[8].text, "\"slot\" is missing"));

    f = fmemopen((void *)text, sizeof(text) - 1, "r");
    cr_assert_eq(config_load_stream(f, "f", &c, NULL, NULL), -EINVAL, "nobody needs to listen");
    fclose(f);
}

/* `limit` sections are taken, one more is not. `each` has up to two %u. */
static void assert_limit(const char *each, const char *keys, unsigned limit, const char *says)
{
    static char text[1 << 17];
    struct problems p;
    struct config *c;

    for (unsigned count = limit; count <= limit + 1; count++) {
        size_t n = (size_t)sprintf(text, "[space s]\n[pool s/p]\nslot = 4K\nslots = 1\n");

        for (unsigned i = 0; i < count; i++)
            n += (size_t)sprintf(text + n, "[%s%u]\n%s", each, i, keys);
        if (strcmp(each, "socket x") == 0) { /* paths must differ */
            n = (size_t)sprintf(text, "[space s]\n[pool s/p]\nslot = 4K\nslots = 1\n");
            for (unsigned i = 0; i < count; i++)
                n += (size_t)sprintf(text + n, "[socket x%u]\npath = /tmp/%u\n", i, i);
        }
        if (strcmp(each, "spill s/p/x") == 0) {
            n = (size_t)sprintf(text, "[space s]\n[pool s/p]\nslot = 4K\nslots = 1\n");
            for (unsigned i = 0; i < count; i++)
                n += (size_t)sprintf(text + n, "[spill s/p/x%u]\npath = /x/%u\n%s", i, i, keys);
        }
        cr_assert_eq(load(text, &c, &p), count > limit ? -EINVAL : 0, "%s%s", each, all_of(&p));
        cr_assert_eq(p.errors, count > limit, "%s", all_of(&p));
        if (count == limit)
            config_free(c);
    }
    for (unsigned i = 0; i < p.n && i < 32; i++)
        if (!p.list[i].warning)
            cr_assert_not_null(strstr(p.list[i].text, says), "%s", all_of(&p));
}

Test(config, limits_the_number_of_sections)
{
    assert_limit("space x", "", 63, "more than 64 sections [space NAME]");
    assert_limit("pool s/x", "slot = 4K\nslots = 1\n", 255,
                 "more than 256 sections [pool SPACE/NAME]");
    assert_limit("socket x", "", 64, "more than 64 sections [socket NAME]");
    assert_limit("tenant ", "", 1024, "more than 1024 sections [tenant NUMBER]");
    assert_limit("spill s/p/x", "size = 4M\n", 256,
                 "more than 256 sections [spill SPACE/POOL/NAME]");
}

/* ---- what must fit together */

Test(config, needs_a_space)
{
    assert_error("", 0, "there is no [space NAME]");
    assert_error("[daemon]\n", 0, "there is no [space NAME]");
}

Test(config, warns_of_what_is_useless)
{
    assert_problem(MINIMAL "[space t]\n", true, 5, "space \"t\" has no [pool t/NAME]");
    assert_problem(MINIMAL "[socket k]\nspaces = s, tt*\n", true, 6, "\"tt*\" matches no space");
    assert_problem(MINIMAL "[space t]\n[pool t/p]\nslot = 4K\nslots = 1\n[socket k]\nspaces = s\n",
                   true, 5, "space \"t\" is in the \"spaces\" of no socket");
    assert_problem(MINIMAL "[socket k]\nmode = 0666\nrole = admin\n", true, 6,
                   "every user of this machine may attach as admin");
    config_free(must_load(MINIMAL "[socket k]\nmode = 0666\nuids = 7\n"));
}

Test(config, checks_frames)
{
    config_free(must_load(MINIMAL "[daemon]\nmax_frame = 64K\nmax_inline = 60K\n"));
    assert_error(MINIMAL "[daemon]\nmax_frame = 64K\nmax_inline = 61K\n", 7,
                 "max_inline (62464) must be at least 4096 bytes less than max_frame (65536)");
    assert_error(MINIMAL "[daemon]\nmax_frame = 256K\n", 6, "max_inline (262144) must be");
}

#define POOL "[pool s/p]\nslot = 4K\nslots = 1\n"

Test(config, checks_schemes)
{
    config_free(must_load(POOL
                          "[space s]\nscheme = sglang\nvector_key = "
                          "77d735ce838418aa151bd96b5b1e78ee63860892e0a95c00fe34178442be9b07\n"));
    config_free(must_load(POOL
                          "[space s]\nscheme = vllm-xxhash-cbor\nfirst_parent = "
                          "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0\n"));
    config_free(must_load(POOL "[space s]\nscheme = vllm-sha256-cbor\n"));
    config_free(must_load(POOL "[space s]\nfirst_parent = 00\nvector_key =\n"));
    assert_error(POOL "[space s]\nscheme = sglang\nseed = x\n", 6,
                 "seed: scheme sglang has no first parent");
    assert_error(POOL "[space s]\nscheme = sglang\nfirst_parent = 00\n", 6,
                 "first_parent: scheme sglang has no first parent");
    assert_error(POOL "[space s]\nseed = x\n", 5, "scheme opaque does not hash");
    assert_error(POOL "[space s]\nscheme = vllm-sha256-cbor\nfirst_parent = 0011\n", 6,
                 "it has 32 bytes, or 16 as a hash of XXH3, but not 2");
    assert_error(POOL "[space s]\nscheme = vllm-sha256-cbor\nvector_key = 0011\n", 6,
                 "a key of scheme vllm-sha256-cbor has 32 bytes, not 2");
    assert_error(POOL "[space s]\nscheme = vllm-xxhash-cbor\nvector_key = 0011\n", 6,
                 "has 16 bytes, not 2");
}

#define IN_POOL "[space s]\n[pool s/p]\n"

Test(config, checks_slots)
{
    struct config *c = must_load(IN_POOL "slot = 4G\nsize = 512G\nparts = 64\n");

    cr_assert_eq(c->pools[0].slots, 128);
    cr_assert_eq(c->pools[0].part_bytes, 64 * MIB);
    config_free(c);
    c = must_load(IN_POOL "slot = 12K\nsize = 40K\nparts = 3\n");
    cr_assert_eq(c->pools[0].slots, 3);
    cr_assert_eq(c->pools[0].size, 36 * KIB, "what is left over is not taken");
    config_free(c);
    c = must_load(IN_POOL "slot = 4K\nslots = 268435456\n");
    cr_assert_eq(c->pools[0].size, TIB);
    config_free(c);

    assert_error(IN_POOL "slot = 4K\n", 2, "\"size\" (bytes) or \"slots\"");
    assert_error(IN_POOL "slots = 4\n", 2, "\"slot\" is missing");
    assert_error(IN_POOL "slot = 2K\nslots = 4\n", 3, "out of range: 4K to 4G");
    assert_error(IN_POOL "slot = 5G\nslots = 4\n", 3, "out of range: 4K to 4G");
    assert_error(IN_POOL "slot = 4097\nslots = 4\n", 3, "not a multiple of parts * 4096");
    assert_error(IN_POOL "slot = 16K\nslots = 4\nparts = 3\n", 3,
                 "slot: 16384 is not a multiple of parts * 4096 = 12288");
    assert_error(IN_POOL "slot = 4M\nsize = 2M\n", 4, "room for 0 slots");
    assert_error(IN_POOL "slot = 4K\nsize = 2T\n", 4, "room for 536870912 slots");
    assert_error(IN_POOL "slot = 4K\nslots = 268435457\n", 4, "out of range");
    assert_error(IN_POOL "slot = 4K\nsize = 65T\n", 4, "out of range: 4K to 64T");
}

Test(config, checks_the_number_of_segments)
{
    config_free(must_load(IN_POOL "slot = 8K\nslots = 4096\nparts = 2\nchunk = 4K\n"));
    assert_error(IN_POOL "slot = 8K\nslots = 4097\nparts = 2\nchunk = 4K\n", 6, "8194 segments");
}

Test(config, checks_the_total)
{
    config_free(must_load("[space s]\n"
                          "[pool s/a]\nslot = 4G\nsize = 32T\nchunk = 1T\n"
                          "[pool s/b]\nslot = 4G\nsize = 32T\nchunk = 1T\n"));
    assert_error("[space s]\n"
                 "[pool s/a]\nslot = 4G\nsize = 32T\nchunk = 1T\n"
                 "[pool s/b]\nslot = 4G\nsize = 32T\nchunk = 1T\n"
                 "[pool s/c]\nslot = 4G\nslots = 1\n",
                 10, "65540 GiB; at most 65536");
}

static void assert_marks(const char *slots, const char *low, const char *high, uint64_t expect_low,
                         uint64_t expect_high)
{
    char *text =
        format(IN_POOL "slot = 4K\nslots = %s\n%s%s\n%s%s\n", slots, low ? "low_water = " : "",
               low ? low : "", high ? "high_water = " : "", high ? high : "");
    struct config *c = must_load(text);

    cr_assert_eq(c->pools[0].low_water, expect_low, "%s", text);
    cr_assert_eq(c->pools[0].high_water, expect_high, "%s", text);
    config_free(c);
    free(text);
}

Test(config, water_marks)
{
    assert_marks("1000", NULL, NULL, 10, 20);
    assert_marks("1000", "100", NULL, 100, 200);
    assert_marks("1000", "60%", NULL, 600, 1000);
    assert_marks("1000", "0.5%", "1 %", 5, 10);
    assert_marks("1000", NULL, "50", 10, 50);
    assert_marks("1000", "0", NULL, 0, 0);
    assert_marks("1000", "0", "10", 0, 10);
    assert_marks("1000", "999", "100%", 999, 1000);
    assert_marks("1", NULL, NULL, 0, 0);
    assert_marks("99", NULL, NULL, 0, 0);
    assert_marks("100", NULL, NULL, 1, 2);
    assert_marks("268435456", "99.9999%", NULL, 268435187, 268435456);
    assert_error(IN_POOL "slot = 4K\nslots = 1000\nlow_water = 20\nhigh_water = 2%\n", 6,
                 "low_water (20 slots) must be less than high_water (20 slots)");
    assert_error(IN_POOL "slot = 4K\nslots = 1000\nlow_water = 1000\n", 5,
                 "must be less than high_water");
    assert_error(IN_POOL "slot = 4K\nslots = 1000\nhigh_water = 1001\n", 5,
                 "1001 slots are more than the pool has (1000)");
}

Test(config, checks_sockets)
{
    char *fits = format("[daemon]\nruntime_dir = /%0*d\n" MINIMAL "[socket k]\n", 107 - 9 - 1, 0);
    char *too_long = format("[daemon]\nruntime_dir = /%0*d\n" MINIMAL "[socket k]\n", 107 - 9, 0);
    char *implied = format("[daemon]\nruntime_dir = /%0*d\n" MINIMAL, 107 - 9 - 1, 0);
    struct config *c = must_load(fits);

    cr_assert_eq(strlen(c->sockets[0].path), 107);
    cr_assert_str_eq(c->sockets[0].path + 98, "/kvd.sock");
    config_free(c);
    assert_error(too_long, 2, "too long for the path of a socket in it");
    assert_error(implied, 2, "too long for the path of kvd-admin.sock in it");
    assert_error(MINIMAL "[socket a]\n[socket b]\n", 6, "\"path\" is missing");
    assert_error(MINIMAL "[daemon]\nmax_connections = 5\n[socket a]\nmax_connections = 6\n", 8,
                 "max_connections: 6 is more than that of [daemon] (5)");
    free(fits);
    free(too_long);
    free(implied);
}

/* ---- files */

Test(config_files, later_ones_override, .init = make_dir, .fini = remove_dir)
{
    struct problems p;
    struct config *c;

    put("kvd.conf", "[daemon]\nlog_level = error\nmax_sessions = 1\n[space s]\nscheme = "
                    "vllm-sha256-cbor\nseed = x\n[pool s/p]\nslot = 4K\nsize = 1M\n"
                    "[socket k]\nuids = 1,2\nspaces = s\n");
    put("conf.d/10.conf", "[daemon]\nlog_level = debug\n[pool s/p]\nslots = 7\n[space t]\n");
    put("conf.d/9.conf", "[daemon]\nlog_level = notice\n[pool t/p]\nslot = 4K\nslots = 1\n");
    put("conf.d/B.conf", "[socket k]\nuids =\nspaces = *\n");
    put("conf.d/a.conf", "[space s]\nfirst_parent = 00000000000000000000000000000000\n");
    put("conf.d/.hidden.conf", "nonsense");
    put("conf.d/10.conf~", "nonsense");
    put("conf.d/conf", "nonsense");
    cr_assert_eq(load_dir(&c, &p), 0, "%s", all_of(&p));
    cr_assert_eq(p.n, 0, "%s", all_of(&p));
    cr_assert_eq(c->daemon.log_level, LOG_NOTICE, "9 comes after 10");
    cr_assert_eq(c->daemon.max_sessions, 1);
    cr_assert_eq(c->pools[0].slots, 7, "slots in a later file take the place of size");
    cr_assert_eq(c->pools[0].size, 7 * 4096);
    cr_assert_eq(c->space_count, 2);
    cr_assert_eq(c->pools[1].space, 1);
    cr_assert_eq(c->sockets[0].uids.count, 0);
    cr_assert_str_eq(c->sockets[0].spaces.list[0], "*");
    cr_assert_eq(c->sockets[0].spaces.count, 1);
    cr_assert_str_eq(c->spaces[0].seed, "", "first_parent takes the place of seed");
    cr_assert_eq(c->spaces[0].first_parent.len, 16);
    config_free(c);
}

Test(config_files, problems_name_their_file, .init = make_dir, .fini = remove_dir)
{
    struct problems p;
    struct config *c;
    char *path;

    put("kvd.conf", MINIMAL);
    put("conf.d/a.conf", "\n[daemon]\nhugepage = off\n");
    put("conf.d/b.conf", "\n\n[pool s/p]\nlow_water = 300\n");
    cr_assert_eq(load_dir(&c, &p), -EINVAL);
    cr_assert_eq(p.n, 2, "%s", all_of(&p));
    path = format("%s/conf.d/a.conf", config_dir);
    cr_assert_str_eq(p.list[0].file, path);
    cr_assert_eq(p.list[0].line, 3);
    free(path);
    path = format("%s/conf.d/b.conf", config_dir);
    cr_assert_str_eq(p.list[1].file, path);
    cr_assert_eq(p.list[1].line, 4);
    free(path);
}

Test(config_files, unreadable_ones_are_errors, .init = make_dir, .fini = remove_dir)
{
    struct config *untouched = (struct config *)&untouched, *c = untouched;
    struct problems p;
    char *path;

    cr_assert_eq(load_dir(&c, &p), -ENOENT);
    cr_assert_eq(p.errors, 1);
    cr_assert_eq(p.list[0].line, 0);
    cr_assert_not_null(strstr(p.list[0].text, "cannot be opened: No such file"));
    cr_assert_eq(c, untouched);

    memset(&p, 0, sizeof(p));
    cr_assert_eq(config_load(config_dir, &c, collect, &p), -EISDIR);
    cr_assert_eq(p.errors, 1, "%s", all_of(&p));
    cr_assert_eq(c, untouched);

    put("kvd.conf", MINIMAL);
    path = format("%s/conf.d/x.conf", config_dir);
    cr_assert_eq(symlink("/nowhere/at/all", path), 0);
    cr_assert_eq(load_dir(&c, &p), -EINVAL, "%s", all_of(&p));
    cr_assert_eq(p.errors, 1);
    cr_assert_str_eq(p.list[0].file, path);
    cr_assert_eq(c, untouched);

    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(mkdir(path, 0700), 0);
    cr_assert_eq(load_dir(&c, &p), -EINVAL, "%s", all_of(&p));
    cr_assert_not_null(strstr(p.list[0].text, "cannot be read: Is a directory"));
    cr_assert_eq(rmdir(path), 0);
    free(path);
}

Test(config_files, no_conf_d_is_fine, .init = make_dir, .fini = remove_dir)
{
    char *path = format("%s/conf.d", config_dir);
    struct problems p;
    struct config *c;

    put("kvd.conf", MINIMAL);
    cr_assert_eq(rmdir(path), 0);
    cr_assert_eq(load_dir(&c, &p), 0, "%s", all_of(&p));
    config_free(c);
    free(path);
}

Test(config_files, a_relative_path_has_its_conf_d, .init = make_dir, .fini = remove_dir)
{
    struct problems p = {0};
    struct config *c;

    put("kvd.conf", MINIMAL);
    put("conf.d/a.conf", "[daemon]\nlog_level = debug\n");
    cr_assert_eq(chdir(config_dir), 0);
    cr_assert_eq(config_load("kvd.conf", &c, collect, &p), 0, "%s", all_of(&p));
    cr_assert_eq(c->daemon.log_level, LOG_DEBUG);
    config_free(c);
    cr_assert_eq(chdir("/"), 0);
}

Test(config, problems_can_be_printed)
{
    char buf[256] = "";
    FILE *f = fmemopen(buf, sizeof(buf), "w");

    config_problem_print(f, &(struct config_problem){false, "a.conf", 7, "bad"});
    config_problem_print(f, &(struct config_problem){true, "a.conf", 0, "odd"});
    fclose(f);
    cr_assert_str_eq(buf, "a.conf:7: error: bad\na.conf: warning: odd\n");
}

/* ---- questions */

Test(config, identity)
{
    struct config *c = must_load(MINIMAL "[space b]\nmodel = M\ngeometry = a=b\n"
                                         "[pool b/p]\nslot = 4K\nslots = 1\n"
                                         "[space c]\nmodel = M\nrevision = 1\ndtype = bf16\n"
                                         "geometry = g g\n"
                                         "[pool c/p]\nslot = 4K\nslots = 1\n");
    char buf[CONFIG_IDENTITY_SIZE], small[20] = "untouched";

    cr_assert_eq(config_space_identity(&c->spaces[0], buf, sizeof(buf)), 0);
    cr_assert_str_eq(buf, "");
    cr_assert_eq(config_space_identity(&c->spaces[1], buf, sizeof(buf)), 20);
    cr_assert_str_eq(buf, "model=M;geometry=a=b");
    cr_assert_eq(config_space_identity(&c->spaces[2], buf, sizeof(buf)), 42);
    cr_assert_str_eq(buf, "model=M;revision=1;dtype=bf16;geometry=g g");
    cr_assert_eq(config_space_identity(&c->spaces[1], small, sizeof(small)), -ENOBUFS);
    cr_assert_str_eq(small, "untouched");
    config_free(c);
}

Test(config, identity_is_limited)
{
    const int rest = 255 - (int)strlen("model=;geometry=") - 150;
    char *fits = format(POOL "[space s]\nmodel = %0150d\ngeometry = %0*d\n", 0, rest, 0);
    char *too_long = format(POOL "[space s]\nmodel = %0150d\ngeometry = %0*d\n", 0, rest + 1, 0);
    struct config *c = must_load(fits);
    char buf[CONFIG_IDENTITY_SIZE];

    cr_assert_eq(config_space_identity(&c->spaces[0], buf, sizeof(buf)), 255);
    config_free(c);
    assert_error(too_long, 4, "too long: as one string of at most 255 bytes");
    free(fits);
    free(too_long);
}

Test(config, populate_threads)
{
    struct config_daemon d = {.populate_threads = 0};

    cr_assert_eq(config_populate_threads(&d, 0), 1);
    cr_assert_eq(config_populate_threads(&d, 2), 2);
    cr_assert_eq(config_populate_threads(&d, 128), 8);
    d.populate_threads = 20;
    cr_assert_eq(config_populate_threads(&d, 2), 20);
}

Test(config, tenants_are_found)
{
    struct config *c = must_load(MINIMAL "[tenant 9]\nmax_reserved = 9\n[tenant 4294967295]\n"
                                         "max_reserved = 3\n[tenant 0]\nmax_reserved = 1\n"
                                         "[tenant *]\nmax_reserved = 5\n");

    cr_assert_eq(c->tenant_count, 3);
    cr_assert_eq(config_tenant(c, 9)->max_reserved, 9);
    cr_assert_eq(config_tenant(c, UINT32_MAX)->max_reserved, 3);
    cr_assert_eq(config_tenant(c, 0)->max_reserved, 1);
    cr_assert_eq(config_tenant(c, 1)->max_reserved, 5);
    config_free(c);
}

/* ---- documentation */

static char *slurp(const char *name)
{
    char *path = format("%s/%s", KVD_SOURCE_DIR, name), *text = NULL;
    FILE *f = fopen(path, "r");
    size_t size = 0;

    cr_assert_not_null(f, "%s", path);
    cr_assert_gt(getdelim(&text, &size, '\0', f), 0);
    fclose(f);
    free(path);
    return text;
}

static bool key_known(const char *section, const char *key)
{
    struct config_key_info info;

    for (size_t i = 0; config_key_at(i, &info); i++)
        if (strcmp(info.section, section) == 0 && strcmp(info.key, key) == 0)
            return true;
    return false;
}

/* Also proves that the table's defaults can be parsed. */
Test(config_documentation, written_defaults_are_the_defaults)
{
    struct config *expected = must_load(MINIMAL), *c;
    struct config_key_info info;
    const char *text;

    for (size_t i = 0; config_key_at(i, &info); i++) {
        if (!info.dflt)
            continue;
        text = with(info.section, info.key, info.dflt);
        c = must_load(text);
        if (strcmp(info.section, "socket") == 0) { /* with a section there is but one socket */
            config_free(expected);
            expected = must_load(MINIMAL "[socket k]\n");
        } else if (strcmp(info.section, "spill") == 0) {
            config_free(expected);
            expected = must_load(MINIMAL STORE);
        }
        cr_assert_eq(memcmp(c, expected, sizeof(*c)), 0, "%s", text);
        config_free(c);
        config_free(expected);
        expected = must_load(MINIMAL);
    }
    config_free(expected);
}

/* "#key = value" and "#[section]" become settings; "# text" stays a comment. */
static void uncomment(char *text)
{
    for (char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (line[0] == '#' && line[1] && !strchr(" #\n", line[1]))
            line[0] = ' ';
    }
}

Test(config_documentation, the_example_is_valid)
{
    char *text = slurp("systemd/kvd.conf");
    struct config *c = must_load(text);

    cr_assert_eq(c->socket_count, 2, "the default ones");
    config_free(c);
    free(text);
}

Test(config_documentation, everything_in_the_example_is_valid)
{
    char *text = slurp("systemd/kvd.conf");
    struct config *c;

    uncomment(text);
    c = must_load(text);
    cr_assert_eq(c->space_count, 2);
    cr_assert_eq(c->pool_count, 3);
    cr_assert_eq(c->socket_count, 3);
    cr_assert_eq(c->tenant_count, 1);
    cr_assert_eq(c->store_count, 2);
    config_free(c);
    free(text);
}

Test(config_documentation, every_key_is_in_the_example)
{
    char *text = slurp("systemd/kvd.conf"), *line, *save, section[64] = "", key[64];
    struct config_key_info info;
    bool seen[128] = {false};
    size_t total = 0;

    uncomment(text);
    for (line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (sscanf(line, " [%63[a-z]", section) == 1 || sscanf(line, " %63[a-z_] =", key) != 1)
            continue;
        for (size_t i = 0; config_key_at(i, &info); i++)
            seen[i] |= strcmp(info.section, section) == 0 && strcmp(info.key, key) == 0;
    }
    for (; config_key_at(total, &info); total++)
        cr_expect(seen[total], "[%s] %s is not in the example", info.section, info.key);
    cr_assert_gt(total, 30);
    free(text);
}

/* Commented keys of [daemon] show the default. */
Test(config_documentation, the_example_shows_defaults)
{
    char *text = slurp("systemd/kvd.conf"), *end = strstr(text, "\n[space "), line[256];
    struct config_key_info info;

    cr_assert_not_null(end);
    *end = '\0';
    for (size_t i = 0; config_key_at(i, &info); i++) {
        if (strcmp(info.section, "daemon") != 0 || !info.dflt)
            continue;
        snprintf(line, sizeof(line), "\n#%s = %s\n", info.key, info.dflt);
        cr_expect_not_null(strstr(text, line), "%s", line);
    }
    free(text);
}

/* The section of the manual page that begins with .SH "[kind and ends at the next. */
static char *manual_section(const char *text, const char *kind)
{
    char *header = format("\n.SH \"[%s", kind), *begin = strstr(text, header), *end;

    cr_assert_not_null(begin, "%s", header);
    begin++;
    end = strstr(begin, "\n.SH ");
    cr_assert_not_null(end);
    free(header);
    return strndup(begin, (size_t)(end - begin));
}

/* What stands in parentheses below the tag of a key; NULL: there is no such tag. */
static char *manual_summary(const char *section, const char *key)
{
    char *tag = format("\n.B %s\n(", key), *found = strstr(section, tag);
    size_t skip = strlen(tag);

    free(tag);
    return found ? strndup(found + skip, strcspn(found + skip, "\n")) : NULL;
}

Test(config_documentation, every_key_is_in_the_manual_with_its_default)
{
    char *text = slurp("docs/man/kvd.conf.5");
    struct config_key_info info;
    size_t total = 0;

    for (; config_key_at(total, &info); total++) {
        char *section = manual_section(text, info.section);
        char *summary = manual_summary(section, info.key);
        char *dflt = format("; default %s)", info.dflt ? info.dflt : "");

        cr_expect_not_null(summary, "[%s] %s", info.section, info.key);
        if (summary && info.dflt)
            cr_expect_not_null(strstr(summary, dflt), "%s: %s", info.key, summary);
        else if (summary)
            cr_expect(strstr(summary, "required") || strstr(summary, "default: "), "%s: %s",
                      info.key, summary);
        free(dflt);
        free(summary);
        free(section);
    }
    cr_assert_gt(total, 30);
    free(text);
}

Test(config_documentation, the_manual_has_no_other_keys)
{
    static const char *const kinds[] = {"daemon", "space", "pool", "socket", "tenant", "spill"};
    char *text = slurp("docs/man/kvd.conf.5"), key[64];
    struct config_key_info info;
    size_t keys = 0, tags = 0;

    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        char *section = manual_section(text, kinds[i]);

        for (char *p = section; (p = strstr(p, "\n.T")); p++)
            if (sscanf(p, "\n.T%*[PQ]\n.B %63[a-z_]", key) == 1) {
                cr_expect(key_known(kinds[i], key), "[%s] %s", kinds[i], key);
                tags++;
            }
        free(section);
    }
    while (config_key_at(keys, &info))
        keys++;
    cr_assert_eq(tags, keys);
    free(text);
}

Test(config_documentation, the_example_of_the_manual_is_valid)
{
    const char *before = "\n.SH EXAMPLE\n.nf\n";
    char *text = slurp("docs/man/kvd.conf.5"), *begin = strstr(text, before), *end;

    cr_assert_not_null(begin);
    begin += strlen(before);
    end = strstr(begin, "\n.fi");
    cr_assert_not_null(end);
    end[1] = '\0';
    config_free(must_load(begin));
    free(text);
}
