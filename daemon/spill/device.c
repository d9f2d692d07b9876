/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store's life: opened or formatted by a task, used, closed when it fails or when somebody says so.
 *
 *      OFFLINE ──> STARTING ──> ONLINE ──> CLOSING ──> OFFLINE
 *
 * CLOSING begins nothing and waits for what is with the device; a device that hangs keeps its store there.
 * From the first moment of it lookups find nothing in the store any more, but for what is being read.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "daemon/config.h"
#include "daemon/log.h"
#include "daemon/spill/engine.h"

/* In a row; then the store is given up. */
#define FAILURES_MAX 8u

#define DAY_NS       86400000000000u
#define LOAD_BATCH   512u
#define LOAD_ROUNDS  16u
#define SUPER_TRIES  16u

/* So long a lock is waited for before it is worth a word. */
#define WAITING_NS 1000000000u

/* A reservoir of so much time: what was not written lately may be made up for. */
#define BURST_NS    250000000u

#define SCRUB_MOST  2u
#define SCRUB_LOOKS 4096u

static struct log *log_of(const struct store *st)
{
    return st->nvme->core->log;
}

#define store_log(st, level, ...)                                                                  \
    log_write(log_of(st), level,                                                                   \
              &(struct log_fields){.space = (st)->spill->pool->space->name,                        \
                                   .pool = (st)->spill->pool->name},                               \
              __VA_ARGS__)

static const char *state_name(const struct store *st)
{
    struct store_progress p;

    switch (st->state) {
    case STORE_ONLINE:
        return st->read_only ? "read-only" : "online";
    case STORE_OFFLINE:
    case STORE_CLOSING:
        return "offline";
    case STORE_STARTING:
        break;
    }
    store_task_progress(st->task, &p);
    return p.phase == STORE_LOCKING      ? "waiting"
           : p.phase == STORE_FORMATTING ? "formatting"
           : p.phase == STORE_READING    ? "reading"
                                         : "opening";
}

bool store_usable(const struct store *st)
{
    return st->state == STORE_ONLINE;
}

bool store_writable(const struct store *st)
{
    return st->state == STORE_ONLINE && !st->read_only && !st->trimming;
}

/* ---- limits */

static bool refill(struct store *st, uint64_t now)
{
    uint64_t ns = now - st->tokens_ns;

    if (ns > BURST_NS)
        ns = BURST_NS;
    st->tokens += (int64_t)((unsigned __int128)ns * st->bandwidth / 1000000000u);
    if (st->tokens > (int64_t)(st->bandwidth / 4))
        st->tokens = (int64_t)(st->bandwidth / 4);
    st->tokens_ns = now;
    return st->tokens > 0;
}

bool store_may_write(struct store *st, uint64_t bytes)
{
    uint64_t now = nvme_now(st->nvme);

    if (now - st->day_ns >= DAY_NS) {
        st->day_ns = now;
        st->day_written = 0;
    }
    if (st->wear && st->day_written + bytes > st->wear)
        return false;
    if (st->bandwidth && !refill(st, now)) {
        uint64_t wait = (uint64_t)(-st->tokens + 1) * 1000000000u / st->bandwidth + 1000000;

        if (!st->retry_ns || now + wait < st->retry_ns)
            st->retry_ns = now + wait;
        return false;
    }
    st->tokens -= (int64_t)bytes;
    st->day_written += bytes;
    return true;
}

void store_unwrite(struct store *st, uint64_t bytes)
{
    st->tokens += (int64_t)bytes;
    st->day_written -= st->day_written < bytes ? st->day_written : bytes;
}

/* ---- going offline */

static void abort_writes(struct store *st)
{
    struct list *i, *tmp;

    kvd_list_for_each (i, tmp, &st->writes) {
        struct transfer *t = list_entry(i, struct transfer, in_store);

        list_remove(i);
        if (!t->error)
            t->error = -ECANCELED;
        if (!t->running)
            transfer_pieces_done(t);
    }
}

static void task_ended(struct store *st, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static void task_ended(struct store *st, int status, const char *fmt, ...)
{
    va_list args;

    st->last_task.running = false;
    st->last_task.status = status;
    va_start(args, fmt);
    vsnprintf(st->last_task.result, sizeof(st->last_task.result), fmt, args);
    va_end(args);
}

static void task_begun(struct store *st, const char *name, const char *unit, uint64_t total)
{
    st->last_task =
        (struct task_status){.name = name, .running = true, .unit = unit, .total = total};
}

static void close_store(struct store *st)
{
    if (st->state != STORE_ONLINE)
        return;
    st->state = STORE_CLOSING;
    st->scrubbing = st->syncing = false;
    if (st->last_task.running)
        task_ended(st, -ECANCELED, "the store went offline");
    fetch_fail_queued(st, -ENOENT);
    abort_writes(st);
    sectors_give_up(st, -ECANCELED);
    st->dropping = true;
    st->drop_cursor = 0;
    record_drop_store(st);
}

void store_failed(struct store *st, int error, const char *fix, const char *fmt, ...)
{
    char why[384];
    va_list args;

    if (st->state != STORE_ONLINE || (error == -ENOSPC && st->read_only))
        return;
    va_start(args, fmt);
    vsnprintf(why, sizeof(why), fmt, args);
    va_end(args);
    snprintf(st->problem, sizeof(st->problem), "%s", why);
    snprintf(st->fix, sizeof(st->fix), "%s", fix ? fix : "");
    if (error == -ENOSPC) {
        st->read_only = true;
        snprintf(st->fix, sizeof(st->fix), "make room, then `kvctl spill online %s`",
                 st->full_name);
        store_log(st, LOG_ERR, "store %s is read-only: %s; fix: %s", st->full_name, why, st->fix);
        return;
    }
    store_log(st, LOG_ERR, "store %s goes offline: %s; ram goes on without it%s%s", st->full_name,
              why, st->fix[0] ? "; fix: " : "", st->fix);
    close_store(st);
}

void store_count(struct store *st, int error)
{
    switch (error) {
    case 0:
        st->failures = 0;
        return;
    case -ECANCELED: /* nothing that the device has done */
    case -ESHUTDOWN:
    case -ESTALE:
    case -EFAULT:
    case -ENOSPC:
    case -EBADMSG:
    case -EILSEQ:
    case -ENOENT:
    case -ENOMEM:
        return;
    default:
        st->stats.errors++;
        if (++st->failures < FAILURES_MAX)
            return;
        store_failed(st, error, "look at the device (dmesg), then `kvctl spill online`",
                     "%u errors in a row, the last: %s", st->failures, strerror(-error));
    }
}

static bool is_quiet(const struct store *st)
{
    return !st->n_transfers && !st->in_io && sectors_idle(st) && !st->super_issued && !st->task;
}

/* At the end of the process what a device that hangs may still write to stays where it is. */
static void drop_io(struct store *st)
{
    bool owned = st->busy_pieces || sectors_oldest_ns(st) || st->super_issued;

    if (owned) {
        st->pieces = NULL;
        st->sectors = NULL;
        st->super_image = NULL;
    }
    if (st->io)
        epoll_ctl(st->nvme->epoll_fd, EPOLL_CTL_DEL, st->io->fd, NULL);
    io_free(st->io);
    st->io = NULL;
    st->n_ops = 0;
    st->has_refused = false;
    st->super_copy = -1;
    pieces_free(st);
    sectors_free(st);
    free(st->super_image);
    st->super_image = NULL;
    if (st->file.fd >= 0)
        close(st->file.fd); /* and with it goes the lock */
    st->file.fd = -1;
}

static void closed(struct store *st)
{
    int then = st->then;

    drop_io(st);
    st->state = STORE_OFFLINE;
    st->dropping = true;
    st->drop_cursor = 0;
    while (record_drop_store(st))
        ;
    st->then = -1;
    if (then >= 0)
        store_start(st, (enum store_job)then, st->then_force);
}

/* ---- opening */

static void set_all_free(struct store *st, uint32_t n)
{
    memset(st->free_bits, 0, (st->planned + 63) / 64 * sizeof(uint64_t));
    for (uint32_t i = 0; i < n; i++)
        st->free_bits[i / 64] |= (uint64_t)1 << i % 64;
}

int store_start(struct store *st, enum store_job job, bool force)
{
    struct store_spec spec = {
        .name = st->full_name,
        .path = st->path,
        .bytes = st->bytes,
        .epoch = st->spill->pool->space->epoch,
        .force = force,
        .no_lock = st->nvme->options.no_lock,
    };
    int r;

    if (st->state != STORE_OFFLINE || st->task)
        return -EBUSY;
    while (record_drop_store(st)) /* what an opening that failed has left */
        ;
    record_unlink_store(st);
    st->n_unresolved = st->n_erase = 0;
    pool_geometry(st->spill->pool, &spec.geometry);
    set_all_free(st, st->planned);
    st->records = st->planned;
    r = store_task_open(&spec, job, st->nvme->event_fd, &st->task);
    if (r < 0) {
        snprintf(st->problem, sizeof(st->problem), "cannot begin to open it: %s", strerror(-r));
        return r;
    }
    st->job = job;
    st->forced = force;
    st->state = STORE_STARTING;
    if (job != STORE_FORMAT) /* a format that is refused must not hide what is wrong */
        st->problem[0] = st->fix[0] = 0;
    st->cancelled = st->told_waiting = false;
    st->read_only = false;
    st->failures = 0;
    task_begun(st, job == STORE_FORMAT ? "format" : "open", "bytes", 0);
    return 0;
}

static bool kernel_registers_quickly(void)
{
    struct utsname u;
    int major = 0, minor = 0;

    return uname(&u) == 0 && sscanf(u.release, "%d.%d", &major, &minor) == 2 &&
           (major > 6 || (major == 6 && minor >= 12));
}

static uint32_t windows(const struct store *st, struct io_window *ret)
{
    const struct pool *p = st->spill->pool;

    if (st->register_pages == CONFIG_REGISTER_NO ||
        (st->register_pages == CONFIG_REGISTER_AUTO &&
         (p->page_bytes < (2u << 20) || !kernel_registers_quickly())))
        return 0;
    for (uint32_t i = 0; i < p->parts; i++)
        ret[i] =
            (struct io_window){.addr = p->base[i].base, .bytes = (size_t)p->slots * p->part_bytes};
    return p->parts;
}

static int make_io(struct store *st)
{
    struct io_window window[SHM_PARTS_MAX];
    struct io_options o = {
        .fd = st->file.fd,
        .depth = st->depth + 16, /* the tables and the superblock come on top */
        .backend = (enum io_backend)st->backend,
        .windows = window,
        .n_windows = windows(st, window),
    };
    struct epoll_event e = {.events = EPOLLIN};
    int r = io_new(&o, st->note, sizeof(st->note), &st->io);

    if (r == 0 && st->nvme->options.wrap)
        r = st->nvme->options.wrap(st->nvme->options.wrap_arg, st->full_name, st->io, &st->io);
    if (r < 0)
        return r;
    snprintf(st->io_text, sizeof(st->io_text), "%s%s%s", st->io->ops->name,
             st->file.direct ? "" : ", buffered", st->io->registered ? ", registered buffers" : "");
    return epoll_ctl(st->nvme->epoll_fd, EPOLL_CTL_ADD, st->io->fd, &e) < 0 ? -errno : 0;
}

/* Other pools' stores may have been opened before. */
static void younger_epoch(struct space *space, uint32_t epoch)
{
    space_set_epoch(space, epoch);
    for (uint32_t i = 0; i < space->n_pools; i++)
        spill_reset(space->pools[i]);
}

/* Which epoch counts. Before anybody has attached, the younger one of store and space, so that what was
 * stored is found again. Later the space's is fixed; a store that comes late with another one is empty, or
 * behind (then it holds nothing that counts), or nobody can tell which of the two is right. */
static int settle_epoch(struct store *st)
{
    struct space *space = st->spill->pool->space;
    uint32_t epoch = st->file.super.epoch;

    if (!st->nvme->ready || st->was_online) {
        if (!st->nvme->ready && epoch > space->epoch)
            younger_epoch(space, epoch);
        return 0;
    }
    if (epoch < space->epoch || (epoch == space->epoch && !space->resets) || !st->used)
        return 0;
    snprintf(
        st->problem, sizeof(st->problem),
        "it came after the space was in use, and its epoch %u cannot be told from the space's %u",
        epoch, space->epoch);
    snprintf(st->fix, sizeof(st->fix), "restart kvd, or `kvctl spill format %s --force`",
             st->full_name);
    return -ESTALE;
}

static int take_up(struct store *st)
{
    int r = settle_epoch(st);

    st->records =
        st->file.super.records < st->planned ? (uint32_t)st->file.super.records : st->planned;
    for (uint32_t i = st->records; i < st->planned; i++)
        st->free_bits[i / 64] &= ~((uint64_t)1 << i % 64);
    if (r == 0)
        r = pieces_new(st);
    if (r == 0)
        r = sectors_new(st);
    if (r == 0) {
        st->super_image = aligned_alloc(FORMAT_SUPER_BYTES, FORMAT_SUPER_BYTES);
        r = st->super_image ? 0 : -ENOMEM;
    }
    return r == 0 ? make_io(st) : r;
}

/* What lies behind the configured size would neither be found nor erased, and come back one day. */
static int check_size(struct store *st)
{
    const struct format_super *super = &st->file.super;

    if (super->records > st->planned) {
        snprintf(st->problem, sizeof(st->problem),
                 "it was made for %llu objects, and its configured size is for %u",
                 (unsigned long long)super->records, st->planned);
        snprintf(st->fix, sizeof(st->fix),
                 "size = %lluM as before, or `kvctl spill format %s --force`",
                 (unsigned long long)(super->bytes + (1u << 20) - 1) >> 20, st->full_name);
        return -EFBIG;
    }
    if (st->bytes && super->records < st->planned)
        store_log(
            st, LOG_WARNING,
            "store %s has room for %llu objects, not the %u of its configured size; fix: `kvctl "
            "spill format %s --force` makes it anew",
            st->full_name, (unsigned long long)super->records, st->planned, st->full_name);
    return 0;
}

static void opened(struct store *st, uint64_t broken)
{
    int r;

    st->problem[0] = st->fix[0] = 0;
    r = check_size(st);
    if (r == 0)
        r = take_up(st);
    if (r < 0) {
        if (!st->problem[0])
            snprintf(st->problem, sizeof(st->problem), "%s cannot be used: %s%s%s", st->path,
                     strerror(-r), st->note[0] ? ": " : "", st->note);
        store_log(st, LOG_ERR, "store %s is offline: %s%s%s", st->full_name, st->problem,
                  st->fix[0] ? "; fix: " : "", st->fix);
        task_ended(st, r, "%s", st->problem);
        st->state = STORE_CLOSING; /* nothing is in flight */
        return;
    }
    record_loaded(st);
    st->state = STORE_ONLINE;
    st->was_online = true;
    st->spill->purging = true; /* what other epochs have left */
    st->spill->purge_cursor = 0;
    spill_consider_all(st->spill);
    if (st->job == STORE_FORMAT)
        task_ended(st, 0, "formatted, with room for %u objects", st->records);
    else
        task_ended(st, 0, "%u of %u objects found%s", st->used, st->records,
                   broken ? "; some records were damaged" : "");
    store_log(st, LOG_INFO, "store %s (%s) is online: %s%u of %u objects, epoch %u, %s%s%s",
              st->full_name, st->path, st->job == STORE_FORMAT ? "formatted, " : "", st->used,
              st->records, st->file.super.epoch, st->io_text, st->note[0] ? "; " : "", st->note);
    if (broken)
        store_log(st, LOG_WARNING,
                  "store %s: %llu records of its table make no sense; they are free", st->full_name,
                  (unsigned long long)broken);
}

static void failed(struct store *st, int error, const char *why)
{
    int then = st->then;

    st->state = STORE_OFFLINE;
    if (st->job != STORE_FORMAT || st->forced || !st->problem[0])
        snprintf(st->problem, sizeof(st->problem), "%s", why);
    st->dropping = true;
    st->drop_cursor = 0;
    task_ended(st, error, "%s", why);
    if (st->cancelled) {
        snprintf(st->problem, sizeof(st->problem), "an administrator said so");
        snprintf(st->fix, sizeof(st->fix), "`kvctl spill online %s`", st->full_name);
    } else {
        store_log(st, LOG_ERR, "store %s is offline: %s", st->full_name, why);
    }
    st->then = -1;
    if (then >= 0)
        store_start(st, (enum store_job)then, st->then_force);
}

static bool load_some(struct store *st)
{
    struct store_loaded *batch = malloc(LOAD_BATCH * sizeof(*batch));
    uint32_t n = LOAD_BATCH;

    for (uint32_t k = 0; batch && k < LOAD_ROUNDS && n == LOAD_BATCH; k++) {
        n = store_task_take(st->task, batch, LOAD_BATCH);
        for (uint32_t i = 0; i < n; i++)
            record_prefetch(st, &batch[i]);
        for (uint32_t i = 0; i < n; i++)
            record_load(st, &batch[i]);
    }
    free(batch);
    return n == LOAD_BATCH;
}

static void trimmed(struct store *st, int r, const char *why)
{
    st->trimming = false;
    if (r < 0)
        task_ended(st, r, "%s", why);
    else
        task_ended(st, 0, "%u free slots were discarded", st->records - st->used);
}

/* A predecessor's I/O is over in a moment; what lasts longer, people should know of. */
static void tell_waiting(struct store *st)
{
    if (!st->told_waiting) {
        st->told_waiting = true;
        st->waits_ns = nvme_now(st->nvme);
    }
    if (st->problem[0] || nvme_now(st->nvme) - st->waits_ns < WAITING_NS)
        return;
    snprintf(
        st->problem, sizeof(st->problem),
        "it waits for its lock: another kvd uses %s, or I/O of one that was killed is not over",
        st->path);
    snprintf(st->fix, sizeof(st->fix), "stop the other one, or give this one another path");
    store_log(st, LOG_WARNING, "store %s: %s; fix: %s", st->full_name, st->problem, st->fix);
}

/* True: more news wait. */
static bool run_task(struct store *st)
{
    struct store_progress p;
    struct store_file file;
    char why[512] = "";
    int r;

    if (st->job != STORE_TRIM && load_some(st))
        return true;
    store_task_progress(st->task, &p);
    st->last_task.done = p.done;
    st->last_task.total = p.total;
    if (p.phase == STORE_LOCKING)
        tell_waiting(st);
    r = store_task_result(st->task, &file, why, sizeof(why));
    if (r == -EINPROGRESS)
        return false;
    store_task_free(st->task);
    st->task = NULL;
    if (st->job == STORE_TRIM) {
        trimmed(st, r, why);
    } else if (r < 0) {
        failed(st, r, why);
    } else {
        st->file = file;
        opened(st, p.broken);
    }
    return true;
}

/* ---- superblocks: both copies must carry a new epoch before anybody relies on it */

static void write_super(struct store *st)
{
    struct format_super super = st->file.super;

    if (st->n_ops == sizeof(st->ops) / sizeof(st->ops[0]))
        return;
    super.epoch = st->want_epoch;
    super.sequence++;
    format_super_encode(&super, st->super_image);
    st->ops[st->n_ops++] = (struct io_op){
        .cookie = cookie_make(++st->super_generation, COOKIE_SUPER, st->id, 0),
        .buf = st->super_image,
        .offset = st->super_copy ? FORMAT_SUPER_COPY : 0,
        .bytes = FORMAT_SUPER_BYTES,
        .write = true,
        .durable = true,
    };
    st->super_issued = true;
    st->super_since_ns = nvme_now(st->nvme);
}

void store_super_done(struct store *st, uint32_t generation, int64_t result)
{
    char fix[384];

    if (generation != st->super_generation || !st->super_issued)
        return;
    st->super_issued = false;
    if (result == FORMAT_SUPER_BYTES) {
        st->super_tries = 0;
        if (st->super_copy++ == 0)
            return;
        st->super_copy = -1;
        st->file.super.epoch = st->want_epoch;
        st->file.super.sequence++;
        return;
    }
    if (st->super_tries++ < SUPER_TRIES && (result >= 0 || result == -EAGAIN || result == -EINTR)) {
        st->retry_ns = nvme_now(st->nvme) + 1000000;
        return;
    }
    st->super_copy = -1;
    snprintf(fix, sizeof(fix),
             "the space was reset since: `kvctl spill format %s --force` before it is used again",
             st->full_name);
    store_failed(st, result < 0 ? (int)result : -EIO, fix, "its superblock cannot be written: %s",
                 strerror(result < 0 ? (int)-result : EIO));
}

static void run_super(struct store *st)
{
    uint32_t epoch = st->spill->pool->space->epoch;

    if (st->state != STORE_ONLINE || !st->nvme->ready)
        return;
    if (st->super_copy < 0 && st->file.super.epoch != epoch) {
        st->super_copy = 0;
        st->super_tries = 0;
        st->want_epoch = epoch;
    }
    if (st->super_copy >= 0 && !st->super_issued)
        write_super(st);
}

bool spill_reset_done(const struct space *s)
{
    for (uint32_t i = 0; i < s->n_pools; i++) {
        const struct spill *x = s->pools[i]->spill;

        for (uint32_t k = 0; x && k < x->n_stores; k++)
            if (x->stores[k]->state != STORE_OFFLINE && x->stores[k]->file.super.epoch != s->epoch)
                return false;
    }
    return true;
}

void spill_reset(struct pool *p)
{
    struct spill *s = p->spill;

    if (!s)
        return;
    atomic_store_explicit(&p->nvme_index->epoch, p->space->epoch, memory_order_release);
    s->purging = true;
    s->purge_cursor = 0;
    for (uint32_t i = 0; i < s->n_stores; i++)
        if (s->stores[i]->state != STORE_ONLINE)
            store_log(
                s->stores[i], LOG_WARNING,
                "store %s is not online and does not know of the reset; what it holds could be hit "
                "after the host has restarted; fix: `kvctl spill online %s`, or format it",
                s->stores[i]->full_name, s->stores[i]->full_name);
}

/* ---- scrub */

static bool scrub_one(struct store *st, uint32_t r)
{
    struct spill *s = st->spill;
    struct spill_entry x;
    struct transfer *t;

    if (s->records[r].reads || !spill_entry(s->pool, r, &x) ||
        transfer_new(st, TRANSFER_SCRUB, r, SLOT_NONE, x.bytes, &t) < 0)
        return false;
    s->records[r].reads++;
    t->have_user = !s->records[r].has_user;
    list_append(&st->reads, &t->in_store);
    st->scrub_running++;
    if (st->scrub_rate)
        st->scrub_due_ns =
            nvme_now(st->nvme) + x.bytes * s->pool->parts * 1000000000u / st->scrub_rate;
    return true;
}

static void run_scrub(struct store *st)
{
    uint32_t looks = SCRUB_LOOKS;

    if (!st->scrubbing)
        return;
    if (st->scrub_rate && nvme_now(st->nvme) < st->scrub_due_ns)
        return;
    while (looks-- && list_empty(&st->reads) && st->scrub_running < SCRUB_MOST &&
           st->scrub_cursor < st->records)
        if (scrub_one(st, st->base + st->scrub_cursor++) && st->scrub_rate)
            break;
    st->last_task.done = st->scrub_cursor;
    if (st->scrub_cursor < st->records || st->scrub_running)
        return;
    st->scrubbing = false;
    task_ended(st, 0, "%llu broken objects were dropped", (unsigned long long)st->scrub_broken);
}

void scrub_done(struct transfer *t)
{
    struct store *st = t->store;
    struct spill *s = st->spill;
    int error = t->error;

    st->scrub_running--;
    s->records[t->record].reads--;
    if (error == -EIO || error == -EBADMSG || error == -EILSEQ || error == -ENODATA) {
        st->scrub_broken++;
        st->stats.broken++;
        record_forget(s, t->record);
    }
    record_read_end(st, t->record);
    if (!t->counted)
        store_count(st, error);
    transfer_free(t);
}

/* ---- running */

static void run_sync(struct store *st)
{
    const struct spill *s = st->spill;
    uint64_t left = s->queue.n + s->blocked.n + s->writing;

    if (!st->syncing)
        return;
    if (left > st->last_task.total)
        st->last_task.total = left;
    st->last_task.done = st->last_task.total - left;
    if (left && store_writable(st))
        return;
    st->syncing = false;
    if (store_writable(st))
        task_ended(st, 0, "everything is written");
    else
        task_ended(st, -EROFS, "it is %s: nothing can be written to it", state_name(st));
}

bool store_run(struct store *st)
{
    bool more = false;

    if (st->task)
        more = run_task(st);
    if (st->state == STORE_CLOSING && is_quiet(st))
        closed(st);
    more |= record_drop_store(st);
    run_super(st);
    run_scrub(st);
    run_sync(st);
    return more;
}

void store_check_hang(struct store *st, uint64_t now)
{
    uint64_t limit = 4 * st->nvme->options.fetch_deadline_ns, oldest = store_oldest_ns(st);

    if (st->super_issued && (!oldest || st->super_since_ns < oldest))
        oldest = st->super_since_ns;
    if (st->state != STORE_ONLINE || !oldest || oldest >= now || now - oldest < limit)
        return;
    st->stats.timeouts++;
    store_failed(st, -ETIMEDOUT, "look at the device (dmesg), then `kvctl spill online`",
                 "the device has not answered for %llu s",
                 (unsigned long long)(now - oldest) / 1000000000u);
}

void store_abandon(struct store *st)
{
    st->then = -1;
    if (st->task)
        store_task_cancel(st->task);
    close_store(st);
}

void store_free(struct store *st)
{
    if (!st)
        return;
    store_task_free(st->task);
    list_remove(&st->in_nvme);
    drop_io(st);
    if (st->policy)
        policy_lru.destroy(st->policy);
    free(st->unresolved);
    free(st->erase);
    free(st->free_bits);
    free(st);
}

/* ---- for administrators */

static uint64_t reading(const struct store *st)
{
    uint64_t n = st->n_transfers - st->scrub_running;

    return n > st->spill->writing ? n - st->spill->writing : 0;
}

static bool is_deleted(const struct store *st)
{
    struct stat x;

    return st->state == STORE_ONLINE && !st->file.device && fstat(st->file.fd, &x) == 0 &&
           x.st_nlink == 0;
}

void store_status(const struct store *st, struct store_status *ret)
{
    const struct spill *s = st->spill;

    *ret = (struct store_status){
        .path = st->path,
        .state = state_name(st),
        .problem = st->problem[0] ? st->problem : NULL,
        .fix = st->fix[0] ? st->fix : NULL,
        .io = st->io ? st->io_text : NULL,
        .note = st->note[0] ? st->note : NULL,
        .admission = st->second_touch ? "second_touch" : "all",
        .bytes = st->file.fd >= 0 ? st->file.super.bytes : st->bytes,
        .records = st->records,
        .used = st->used,
        .queued = s->queue.n + s->blocked.n,
        .writing = s->writing,
        .reading = reading(st),
        .bandwidth = st->bandwidth,
        .epoch = st->file.super.epoch,
        .stats = st->stats,
        .task = st->last_task,
    };
    snprintf(ret->name, sizeof(ret->name), "%s", st->full_name);
    if (st->state == STORE_CLOSING && !ret->problem)
        ret->problem = "it waits for what is with the device";
    if (is_deleted(st)) {
        ret->problem = "its file has been deleted: what is written to it is lost when kvd stops";
        snprintf(ret->fix_text, sizeof(ret->fix_text),
                 "`kvctl spill offline %s`, then `kvctl spill online %s` makes a new one",
                 st->full_name, st->full_name);
        ret->fix = ret->fix_text;
    }
}

const struct store_stats *store_stats(const struct store *st)
{
    return &st->stats;
}

static int refuse(char *ret_why, size_t n, int error, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static int refuse(char *ret_why, size_t n, int error, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    vsnprintf(ret_why, n, fmt, args);
    va_end(args);
    return error;
}

static int begin_format(struct store *st, bool force, char *ret_why, size_t n)
{
    if (st->used && !force)
        return refuse(ret_why, n, -EEXIST,
                      "it holds %u objects, which would be lost; fix: `kvctl spill format %s "
                      "--force` if nobody needs them",
                      st->used, st->full_name);
    if (st->state == STORE_OFFLINE)
        return store_start(st, STORE_FORMAT, force);
    if (st->state == STORE_STARTING)
        return refuse(ret_why, n, -EBUSY,
                      "it is being opened; wait, or `kvctl spill offline %s` first", st->full_name);
    st->then = STORE_FORMAT;
    st->then_force = true; /* ours, and empty or given up */
    snprintf(st->problem, sizeof(st->problem), "it is being formatted");
    close_store(st);
    task_begun(st, "format", "bytes", 0);
    return 0;
}

static int check_idle(const struct store *st, char *ret_why, size_t n)
{
    if (st->state != STORE_ONLINE)
        return refuse(ret_why, n, -ENODEV, "it is %s%s%s", state_name(st),
                      st->problem[0] ? ": " : "", st->problem);
    if (st->task || st->last_task.running)
        return refuse(ret_why, n, -EBUSY, "%s is running on it", st->last_task.name);
    return 0;
}

static int begin_trim(struct store *st, char *ret_why, size_t n)
{
    uint8_t *bits;
    int r;

    r = check_idle(st, ret_why, n);
    if (r < 0)
        return r;
    /* The file may have more slots than the configuration: those are left alone. */
    bits = calloc(1, st->file.super.records / 8 + 8);
    if (!bits)
        return refuse(ret_why, n, -ENOMEM, "out of memory");
    memcpy(bits, st->free_bits, (st->records + 7) / 8);
    r = store_task_trim(&st->file, bits, st->nvme->event_fd, &st->task);
    free(bits);
    if (r < 0)
        return refuse(ret_why, n, r, "cannot begin: %s", strerror(-r));
    st->job = STORE_TRIM;
    st->trimming = true; /* a slot that is free now must stay so until it is over */
    task_begun(st, "trim", "bytes", 0);
    return 0;
}

static int begin_scrub(struct store *st, uint64_t rate, char *ret_why, size_t n)
{
    int r = check_idle(st, ret_why, n);

    if (r < 0)
        return r;
    st->scrubbing = true;
    st->scrub_cursor = 0;
    st->scrub_rate = rate;
    st->scrub_due_ns = st->scrub_broken = 0;
    task_begun(st, "scrub", "objects", st->records);
    return 0;
}

static int go_online(struct store *st, char *ret_why, size_t n)
{
    if (st->state == STORE_ONLINE && st->read_only) {
        st->read_only = false;
        st->problem[0] = st->fix[0] = 0;
        spill_consider_all(st->spill);
        store_log(st, LOG_INFO, "store %s is written to again", st->full_name);
        return 0;
    }
    if (st->state == STORE_ONLINE)
        return 0;
    if (st->state == STORE_STARTING && st->cancelled) {
        st->then = STORE_OPEN;
        return 0;
    }
    if (st->state == STORE_STARTING)
        return refuse(ret_why, n, -EALREADY, "it is being opened");
    if (st->state == STORE_CLOSING) {
        st->then = STORE_OPEN;
        task_begun(st, "open", "bytes", 0);
        return 0;
    }
    return store_start(st, STORE_OPEN, false);
}

static int go_offline(struct store *st)
{
    st->then = -1;
    if (st->state == STORE_STARTING) {
        st->cancelled = true;
        store_task_cancel(st->task);
    }
    if (st->state == STORE_ONLINE) {
        snprintf(st->problem, sizeof(st->problem), "an administrator said so");
        snprintf(st->fix, sizeof(st->fix), "`kvctl spill online %s`", st->full_name);
        close_store(st);
    }
    return 0;
}

static int begin_sync(struct store *st, char *ret_why, size_t n)
{
    if (st->state == STORE_STARTING)
        return refuse(ret_why, n, -EBUSY, "it is %s", state_name(st));
    if (st->last_task.running)
        return refuse(ret_why, n, -EBUSY, "%s is running on it", st->last_task.name);
    st->syncing = true;
    task_begun(st, "sync", "objects", 0);
    run_sync(st);
    return 0;
}

int store_act(struct store *st, enum spill_action action, bool force, uint64_t rate, char *ret_why,
              size_t why_bytes)
{
    switch (action) {
    case SPILL_FORMAT:
        return begin_format(st, force, ret_why, why_bytes);
    case SPILL_SCRUB:
        return begin_scrub(st, rate, ret_why, why_bytes);
    case SPILL_TRIM:
        return begin_trim(st, ret_why, why_bytes);
    case SPILL_ONLINE:
        return go_online(st, ret_why, why_bytes);
    case SPILL_OFFLINE:
        return go_offline(st);
    case SPILL_SYNC:
        return begin_sync(st, ret_why, why_bytes);
    case SPILL_STOP:
        if (!st->scrubbing)
            return refuse(ret_why, why_bytes, -ENOENT, "no scrub is running on it");
        st->scrubbing = false;
        task_ended(st, -ECANCELED, "stopped by an administrator");
        return 0;
    }
    return -EINVAL;
}
