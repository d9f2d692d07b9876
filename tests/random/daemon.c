/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fail.h"

enum {
    PATIENCE_MS = 120000, /* of calls: a busy machine is no failure */
};

/* Quarantine is longer than any worker is stopped, see worker_engine.c. */
static const char config_text[] =
    "[daemon]\n"
    "runtime_dir = %s/run\n"
    "hugepages = off\n"
    "populate_threads = 1\n"
    "quarantine = 4s\n"
    "engine_linger = 2s\n"
    "max_inline = 16K\n"
    "[space a]\n"
    "[pool a/kv]\n"
    "slot = 16K\nparts = 2\nslots = 120\nlow_water = 4\nhigh_water = 8\n"
    "[pool a/state]\n"
    "slot = 64K\nslots = 16\nlow_water = 0\nhigh_water = 0\n"
    "[space b]\n"
    "max_reserved = 24\n"
    "[pool b/kv]\n"
    "slot = 8K\nslots = 64\nlow_water = 0\nhigh_water = 0\n"
    "[tenant 3]\n"
    "max_resident = 800K\n"
    "[socket w]\n"
    "path = %s\nrole = writer\n"
    "[socket r]\n"
    "path = %s\nrole = reader\n"
    "[socket a]\n"
    "path = %s\nrole = admin\nmode = 0600\n";

static void write_config(struct daemon *d)
{
    FILE *f;

    strcpy(d->dir, "/dev/shm/kvd-random-XXXXXX");
    expect(mkdtemp(d->dir), "cannot make %s: %s", d->dir, strerror(errno));
    snprintf(d->config, sizeof(d->config), "%s/kvd.conf", d->dir);
    snprintf(d->log, sizeof(d->log), "%s/kvd.log", d->dir);
    snprintf(d->writer, sizeof(d->writer), "%s/writer.sock", d->dir);
    snprintf(d->reader, sizeof(d->reader), "%s/reader.sock", d->dir);
    snprintf(d->admin, sizeof(d->admin), "%s/admin.sock", d->dir);
    f = fopen(d->config, "w");
    expect(f, "cannot write %s", d->config);
    fprintf(f, config_text, d->dir, d->writer, d->reader, d->admin);
    expect(fclose(f) == 0, "cannot write %s", d->config);
}

static void exec_daemon(const struct daemon *d)
{
    int log = open(d->log, O_WRONLY | O_CREAT | O_APPEND, 0600);

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (log >= 0)
        dup2(log, STDERR_FILENO);
    execl(d->program, d->program, "-c", d->config, (char *)NULL);
    _exit(127);
}

static void connect_admin(struct daemon *d)
{
    struct control_options o = {.socket = d->admin, .client = "random-processes"};
    int r = -EAGAIN, status;

    expect(control_new(&o, &d->control) == 0, "out of memory");
    for (int i = 0; i < PATIENCE_MS / 10 && r < 0; i++) {
        expect(waitpid(d->pid, &status, WNOHANG) == 0, "the daemon does not start");
        r = control_connect(d->control, control_deadline(PATIENCE_MS), NULL);
        if (r < 0)
            usleep(10000);
    }
    expect(r == 0, "the daemon does not listen: %s", control_error(d->control));
}

void daemon_start(struct daemon *d, const char *program)
{
    *d = (struct daemon){.program = program};
    write_config(d);
    d->pid = fork();
    expect(d->pid >= 0, "cannot fork");
    if (!d->pid)
        exec_daemon(d);
    connect_admin(d);
    d->fds = daemon_count_fds(d);
}

int daemon_stop(struct daemon *d)
{
    int status = -1;

    control_free(d->control);
    d->control = NULL;
    kill(d->pid, SIGTERM);
    waitpid(d->pid, &status, 0);
    d->pid = 0;
    return status;
}

void daemon_clean(const struct daemon *d)
{
    char command[128];

    snprintf(command, sizeof(command), "rm -rf '%s'", d->dir);
    if (d->dir[0] && system(command) != 0)
        fprintf(stderr, "%s is left\n", d->dir);
}

void daemon_show_log(const struct daemon *d)
{
    char command[160];

    snprintf(command, sizeof(command), "tail -n 30 '%s'", d->log);
    fflush(stdout);
    if (d->log[0] && system(command) != 0)
        fprintf(stderr, "no log\n");
}

/* ---- what is left lying about */

static unsigned int count_entries(const char *path, int (*counts)(const char *name))
{
    DIR *dir = opendir(path);
    unsigned int n = 0;
    struct dirent *e;

    expect(dir, "cannot look into %s", path);
    while ((e = readdir(dir)))
        n += counts(e->d_name) != 0;
    closedir(dir);
    return n;
}

static int is_number(const char *name)
{
    return name[0] >= '0' && name[0] <= '9';
}

unsigned int daemon_count_fds(const struct daemon *d)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)d->pid);
    return count_entries(path, is_number);
}

static int is_of_session(const char *name)
{
    return strncmp(name, "kvd-session-", 12) == 0 || strncmp(name, "kvd-pins-", 9) == 0;
}

static int is_segment(const char *name)
{
    return strncmp(name, "kvd-", 4) == 0;
}

unsigned int daemon_count_files(const struct daemon *d, int all)
{
    char path[96];

    snprintf(path, sizeof(path), "%s/run", d->dir);
    return count_entries(path, all ? is_segment : is_of_session);
}

/* ---- calls */

static void call(struct daemon *d, Kvd__Proto__Request *request,
                 Kvd__Proto__Response__BodyCase answer, struct control_reply *reply)
{
    int r = control_call(d->control, request, answer, control_deadline(PATIENCE_MS), reply);

    expect(r == 0, "the daemon: %s (%s)", control_error(d->control), strerror(-r));
}

static void copy_sums(const Kvd__Proto__PoolStatus *from, struct pool_sums *to)
{
    *to = (struct pool_sums){
        .id = from->info->pool,
        .slots = from->info->slots,
        .free = from->free,
        .reserved = from->reserved,
        .live = from->live,
        .in_flight = from->in_flight,
        .quarantined = from->quarantined,
        .pinned = from->pinned,
        .committed = from->committed_total,
        .evicted = from->evicted_total,
    };
    snprintf(to->name, sizeof(to->name), "%s/%s", from->info->space, from->info->name);
}

uint32_t daemon_status(struct daemon *d, struct pool_sums sums[DAEMON_POOLS])
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Status status = KVD__PROTO__STATUS__INIT;
    const Kvd__Proto__StatusReply *s;
    struct control_reply reply;
    uint32_t sessions;

    request.body_case = KVD__PROTO__REQUEST__BODY_STATUS;
    request.status = &status;
    call(d, &request, KVD__PROTO__RESPONSE__BODY_STATUS_REPLY, &reply);
    s = reply.response->status_reply;
    expect(s->n_pools == DAEMON_POOLS, "%zu pools", s->n_pools);
    expect(!s->n_problems, "the daemon has a problem: %s", s->problems[0]);
    for (size_t i = 0; i < DAEMON_POOLS; i++)
        copy_sums(s->pools[i], &sums[i]);
    sessions = s->sessions;
    control_reply_free(&reply);
    return sessions;
}

uint64_t daemon_flush(struct daemon *d, uint32_t pool)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Flush flush = KVD__PROTO__FLUSH__INIT;
    struct control_reply reply;
    uint64_t removed = 0;

    request.body_case = KVD__PROTO__REQUEST__BODY_FLUSH;
    request.flush = &flush;
    flush.pool = pool;
    flush.has_cursor = true;
    do {
        call(d, &request, KVD__PROTO__RESPONSE__BODY_COUNT, &reply);
        removed += reply.response->count->count;
        flush.cursor = reply.response->count->has_next ? reply.response->count->next : 0;
        control_reply_free(&reply);
    } while (flush.cursor);
    return removed;
}

static void evict(struct daemon *d, Kvd__Proto__Evict *evict)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    struct control_reply reply;

    request.body_case = KVD__PROTO__REQUEST__BODY_EVICT;
    request.evict = evict;
    call(d, &request, KVD__PROTO__RESPONSE__BODY_COUNT, &reply);
    control_reply_free(&reply);
}

void daemon_evict(struct daemon *d, uint32_t pool, uint64_t count)
{
    Kvd__Proto__Evict q = KVD__PROTO__EVICT__INIT;

    q.pool = pool;
    q.has_count = true;
    q.count = count;
    evict(d, &q);
}

void daemon_evict_key(struct daemon *d, uint32_t pool, const uint8_t hash[32], uint32_t group)
{
    Kvd__Proto__Evict q = KVD__PROTO__EVICT__INIT;
    Kvd__Proto__Key key = KVD__PROTO__KEY__INIT, *keys = &key;

    key.hash = (ProtobufCBinaryData){.data = (uint8_t *)hash, .len = 32};
    key.has_group = true;
    key.group = group;
    q.pool = pool;
    q.n_keys = 1;
    q.keys = &keys;
    evict(d, &q);
}

void daemon_evict_tenant(struct daemon *d, uint32_t pool, uint32_t tenant)
{
    Kvd__Proto__Evict q = KVD__PROTO__EVICT__INIT;

    q.pool = pool;
    q.has_tenant = true;
    q.tenant = tenant;
    evict(d, &q);
}

void daemon_reset(struct daemon *d, uint32_t space)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__SpaceReset reset = KVD__PROTO__SPACE_RESET__INIT;

    request.body_case = KVD__PROTO__REQUEST__BODY_SPACE_RESET;
    request.space_reset = &reset;
    reset.space = space;
    call(d, &request, KVD__PROTO__RESPONSE__BODY_SPACE_RESET, NULL);
}

void daemon_look(struct daemon *d, uint32_t pool)
{
    Kvd__Proto__Request request = KVD__PROTO__REQUEST__INIT;
    Kvd__Proto__Sessions sessions = KVD__PROTO__SESSIONS__INIT;
    Kvd__Proto__Blocks blocks = KVD__PROTO__BLOCKS__INIT;
    Kvd__Proto__Stats stats = KVD__PROTO__STATS__INIT;

    request.body_case = KVD__PROTO__REQUEST__BODY_SESSIONS;
    request.sessions = &sessions;
    call(d, &request, KVD__PROTO__RESPONSE__BODY_SESSIONS, NULL);
    request.body_case = KVD__PROTO__REQUEST__BODY_BLOCKS;
    request.blocks = &blocks;
    blocks.pool = pool;
    call(d, &request, KVD__PROTO__RESPONSE__BODY_BLOCKS, NULL);
    request.body_case = KVD__PROTO__REQUEST__BODY_STATS;
    request.stats = &stats;
    call(d, &request, KVD__PROTO__RESPONSE__BODY_STATS, NULL);
}
