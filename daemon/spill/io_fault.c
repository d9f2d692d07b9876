/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Faults around a backend. What is late or has failed by itself needs no thread: the descriptor is an
 * epoll over the backend's own, an eventfd (results that are ready here) and a timerfd (the next
 * that is late). Operations go to the backend one by one: for tests, not for speed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "daemon/list.h"
#include "daemon/spill/io.h"

enum {
    REAP_BATCH = 64,
};

struct rule {
    struct io_fault fault;
    uint64_t seen; /* operations that it could have hit */
};

/* In the list of what it waits for; in none while the backend has it. */
struct fault_op {
    struct list link;
    struct io_op op;
    const struct io_fault *fault; /* or NULL */
    uint32_t bytes;               /* that the backend was asked for */
    void *copy;                   /* of what is written, with a flipped bit; the backend's */
    int64_t result;
    uint64_t due; /* late ones: CLOCK_MONOTONIC, ns */
};

struct fault_io {
    struct io io;
    struct io *inner;
    int event_fd, timer_fd;
    bool signalled; /* event_fd is readable */
    bool released;
    struct list spare, ready, hung, late;
    uint32_t n_rules;
    struct rule *rules;
    struct fault_op ops[]; /* depth */
};

static struct fault_io *fault_of(struct io *io)
{
    return (struct fault_io *)io;
}

static struct fault_op *op_of(struct list *link)
{
    return list_entry(link, struct fault_op, link);
}

static void move(struct fault_op *job, struct list *to)
{
    list_remove(&job->link);
    list_append(to, &job->link);
}

static uint64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

/* ---- which fault */

static bool concerns(const struct io_fault *f, const struct io_op *op)
{
    if (op->write ? !f->writes : !f->reads)
        return false;
    return f->to == 0 || (op->offset < f->to && op->offset + op->bytes > f->from);
}

static struct rule *rule_find(struct fault_io *f, const struct io_op *op)
{
    for (uint32_t i = 0; i < f->n_rules; i++) {
        struct rule *r = &f->rules[i];
        uint64_t end = (uint64_t)r->fault.after + r->fault.times;

        if (concerns(&r->fault, op) && r->seen >= r->fault.after &&
            (!r->fault.times || r->seen < end))
            return r;
    }
    return NULL;
}

/* The operation is seen by the rules up to the one that hit it. */
static void rules_count(struct fault_io *f, const struct io_op *op, const struct rule *hit)
{
    for (uint32_t i = 0; i < f->n_rules; i++) {
        f->rules[i].seen += concerns(&f->rules[i].fault, op);
        if (&f->rules[i] == hit)
            break;
    }
}

/* ---- submitting */

static void flip(void *buf, int64_t bytes)
{
    ((unsigned char *)buf)[bytes / 2] ^= 0x10;
}

static int copy_flipped(struct fault_op *job)
{
    if (posix_memalign(&job->copy, IO_BLOCK, job->op.bytes) != 0) {
        job->copy = NULL;
        return -ENOMEM;
    }
    memcpy(job->copy, job->op.buf, job->op.bytes);
    flip(job->copy, job->op.bytes);
    return 0;
}

static int pass_on(struct fault_io *f, struct fault_op *job)
{
    struct io_op op = job->op;
    int r;

    op.cookie = (uint64_t)(job - f->ops);
    op.bytes = job->bytes;
    if (job->copy)
        op.buf = job->copy;
    list_remove(&job->link);
    r = io_submit(f->inner, &op, 1);
    if (r <= 0)
        list_append(&f->spare, &job->link);
    return r;
}

static int finish(struct fault_io *f, struct fault_op *job, int64_t result)
{
    job->result = result;
    move(job, &f->ready);
    return 1;
}

static int start(struct fault_io *f, struct fault_op *job)
{
    const struct io_fault *fault = job->fault;
    bool cut = fault && (fault->kind == IO_FAULT_SHORT || fault->kind == IO_FAULT_TORN);
    int r;

    if (fault && fault->kind == IO_FAULT_ERROR)
        return finish(f, job, fault->error);
    if (cut && fault->bytes < job->bytes)
        job->bytes = fault->bytes;
    if (cut && !job->bytes)
        return finish(f, job, fault->kind == IO_FAULT_TORN ? job->op.bytes : 0);
    if (fault && fault->kind == IO_FAULT_FLIP && job->op.write && job->bytes) {
        r = copy_flipped(job);
        if (r < 0)
            return r;
    }
    r = pass_on(f, job);
    if (r <= 0) {
        free(job->copy);
        job->copy = NULL;
    }
    return r;
}

/* Only what was taken is counted; what is refused in the middle of a batch will come again. */
static int submit_one(struct fault_io *f, const struct io_op *op, bool first)
{
    struct rule *rule = rule_find(f, op);
    struct fault_op *job;
    int r;

    if (list_empty(&f->spare))
        return 0;
    if (rule && rule->fault.kind == IO_FAULT_REFUSED) {
        if (first)
            rules_count(f, op, rule);
        return first ? rule->fault.error : 0;
    }
    job = op_of(f->spare.next);
    job->op = *op;
    job->bytes = op->bytes;
    job->fault = rule ? &rule->fault : NULL;
    r = start(f, job);
    if (r > 0)
        rules_count(f, op, rule);
    return r;
}

static void event_update(struct fault_io *f)
{
    bool wanted = !list_empty(&f->ready);
    eventfd_t ignored;

    if (wanted && !f->signalled)
        eventfd_write(f->event_fd, 1);
    else if (!wanted && f->signalled)
        eventfd_read(f->event_fd, &ignored);
    f->signalled = wanted;
}

static int fault_submit(struct io *io, const struct io_op *ops, uint32_t n)
{
    struct fault_io *f = fault_of(io);
    uint32_t taken = 0;
    int r = 0;

    for (; taken < n; taken++) {
        r = submit_one(f, &ops[taken], taken == 0);
        if (r <= 0)
            break;
    }
    event_update(f);
    return taken ? (int)taken : r;
}

/* ---- reaping */

static void settle(struct fault_io *f, struct fault_op *job, int64_t result)
{
    enum io_fault_kind kind = job->fault ? job->fault->kind : IO_FAULT_ERROR;

    if (job->fault && kind == IO_FAULT_TORN && result == job->bytes)
        result = job->op.bytes;
    if (job->fault && kind == IO_FAULT_FLIP && !job->op.write && result > 0)
        flip(job->op.buf, result);
    free(job->copy);
    job->copy = NULL;
    job->result = result;
    if (job->fault && kind == IO_FAULT_HANG && !f->released) {
        move(job, &f->hung);
    } else if (job->fault && kind == IO_FAULT_DELAY) {
        job->due = now_ns() + job->fault->delay_ms * UINT64_C(1000000);
        move(job, &f->late);
    } else {
        move(job, &f->ready);
    }
}

static void settle_all(struct fault_io *f)
{
    struct io_done done[REAP_BATCH];
    int n;

    while ((n = io_reap(f->inner, done, REAP_BATCH)) > 0)
        for (int i = 0; i < n; i++)
            settle(f, &f->ops[done[i].cookie], done[i].result);
}

/* Setting the timer also makes it unreadable. */
static void expire(struct fault_io *f)
{
    uint64_t now = now_ns(), next = 0;
    struct itimerspec timer = {0};
    struct list *pos, *tmp;

    kvd_list_for_each (pos, tmp, &f->late) {
        if (op_of(pos)->due <= now)
            move(op_of(pos), &f->ready);
        else if (!next || op_of(pos)->due < next)
            next = op_of(pos)->due;
    }
    timer.it_value.tv_sec = (time_t)(next / UINT64_C(1000000000));
    timer.it_value.tv_nsec = (long)(next % UINT64_C(1000000000));
    timerfd_settime(f->timer_fd, TFD_TIMER_ABSTIME, &timer, NULL);
}

static int fault_reap(struct io *io, struct io_done *ret, uint32_t max)
{
    struct fault_io *f = fault_of(io);
    uint32_t n = 0;

    settle_all(f);
    expire(f);
    for (; n < max && !list_empty(&f->ready); n++) {
        struct fault_op *job = op_of(f->ready.next);

        ret[n] = (struct io_done){.cookie = job->op.cookie, .result = job->result};
        move(job, &f->spare);
    }
    event_update(f);
    return (int)n;
}

/* ---- from beginning to end */

/* A copy that the backend still writes from stays, as everybody's buffers do. */
static void fault_destroy(struct io *io)
{
    struct fault_io *f = fault_of(io);

    io_free(f->inner);
    if (f->io.fd >= 0)
        close(f->io.fd);
    if (f->event_fd >= 0)
        close(f->event_fd);
    if (f->timer_fd >= 0)
        close(f->timer_fd);
    free(f->rules);
    free(f);
}

static const struct io_ops fault_ops = {
    .name = "faults",
    .submit = fault_submit,
    .reap = fault_reap,
    .destroy = fault_destroy,
};

void io_fault_release(struct io *io)
{
    struct fault_io *f = fault_of(io);
    struct list *pos, *tmp;

    if (io->ops != &fault_ops)
        return;
    f->released = true;
    kvd_list_for_each (pos, tmp, &f->hung)
        move(op_of(pos), &f->ready);
    event_update(f);
    io_fault_release(f->inner);
}

static bool fault_valid(const struct io_fault *f)
{
    if ((!f->reads && !f->writes) || (f->to && f->from >= f->to))
        return false;
    switch (f->kind) {
    case IO_FAULT_ERROR:
    case IO_FAULT_REFUSED:
        return f->error < 0;
    case IO_FAULT_SHORT:
    case IO_FAULT_TORN:
        return f->bytes % IO_BLOCK == 0;
    case IO_FAULT_FLIP:
    case IO_FAULT_HANG:
    case IO_FAULT_DELAY:
        return true;
    }
    return false;
}

static int fds_open(struct fault_io *f)
{
    int all[3];

    f->io.fd = epoll_create1(EPOLL_CLOEXEC);
    f->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    f->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (f->io.fd < 0 || f->event_fd < 0 || f->timer_fd < 0)
        return -errno;
    all[0] = f->inner->fd;
    all[1] = f->event_fd;
    all[2] = f->timer_fd;
    for (int i = 0; i < 3; i++) {
        struct epoll_event e = {.events = EPOLLIN};

        if (epoll_ctl(f->io.fd, EPOLL_CTL_ADD, all[i], &e) < 0)
            return -errno;
    }
    return 0;
}

static struct fault_io *fault_alloc(struct io *inner, const struct io_fault *faults, uint32_t n)
{
    struct fault_io *f = calloc(1, sizeof(*f) + inner->depth * sizeof(f->ops[0]));

    if (!f)
        return NULL;
    f->io = (struct io){
        .ops = &fault_ops, .fd = -1, .depth = inner->depth, .registered = inner->registered};
    f->inner = inner;
    f->event_fd = f->timer_fd = -1;
    list_init(&f->spare);
    list_init(&f->ready);
    list_init(&f->hung);
    list_init(&f->late);
    for (uint32_t i = 0; i < inner->depth; i++)
        list_append(&f->spare, &f->ops[i].link);
    f->rules = calloc(n ? n : 1, sizeof(*f->rules));
    if (!f->rules) {
        free(f);
        return NULL;
    }
    for (; f->n_rules < n; f->n_rules++)
        f->rules[f->n_rules].fault = faults[f->n_rules];
    return f;
}

int io_fault_new(struct io *inner, const struct io_fault *faults, uint32_t n, struct io **ret_io)
{
    struct fault_io *f;
    int r;

    for (uint32_t i = 0; i < n; i++)
        if (!fault_valid(&faults[i]))
            return -EINVAL;
    f = fault_alloc(inner, faults, n);
    if (!f)
        return -ENOMEM;
    r = fds_open(f);
    if (r < 0) {
        f->inner = NULL; /* the caller's */
        fault_destroy(&f->io);
        return r;
    }
    *ret_io = &f->io;
    return 0;
}

/* ---- parsing */

static int parse_number(const char *text, uint64_t max, uint64_t *ret)
{
    static const char units[] = "KMGT";
    unsigned long long v;
    const char *unit;
    char *end;

    if (*text < '0' || *text > '9')
        return -EINVAL;
    errno = 0;
    v = strtoull(text, &end, 10);
    unit = *end ? strchr(units, *end) : NULL;
    if (errno || (*end && (!unit || end[1])))
        return -EINVAL;
    for (const char *u = units; unit && u <= unit; u++)
        if (__builtin_mul_overflow(v, 1024ull, &v))
            return -EINVAL;
    if (v > max)
        return -EINVAL;
    *ret = v;
    return 0;
}

static int parse_u32(const char *text, uint32_t *ret)
{
    uint64_t v;

    if (parse_number(text, UINT32_MAX, &v) < 0)
        return -EINVAL;
    *ret = (uint32_t)v;
    return 0;
}

static int parse_error(const char *text, int *ret)
{
    for (int e = 1; e < 4096; e++) {
        const char *name = strerrorname_np(e);

        if (name && strcmp(name, text) == 0) {
            *ret = -e;
            return 0;
        }
    }
    return -EINVAL;
}

static int parse_kind(const char *name, const char *value, struct io_fault *f)
{
    static const char *const names[] = {
        [IO_FAULT_ERROR] = "error",     [IO_FAULT_SHORT] = "short", [IO_FAULT_TORN] = "torn",
        [IO_FAULT_FLIP] = "flip",       [IO_FAULT_HANG] = "hang",   [IO_FAULT_DELAY] = "delay",
        [IO_FAULT_REFUSED] = "refused",
    };
    uint32_t kind = 0;

    while (kind < sizeof(names) / sizeof(names[0]) && strcmp(name, names[kind]) != 0)
        kind++;
    f->kind = (enum io_fault_kind)kind;
    switch (kind) {
    case IO_FAULT_ERROR:
    case IO_FAULT_REFUSED:
        return value ? parse_error(value, &f->error) : -EINVAL;
    case IO_FAULT_SHORT:
    case IO_FAULT_TORN:
        return value ? parse_u32(value, &f->bytes) : -EINVAL;
    case IO_FAULT_DELAY:
        return value ? parse_u32(value, &f->delay_ms) : -EINVAL;
    case IO_FAULT_FLIP:
    case IO_FAULT_HANG:
        return value ? -EINVAL : 0;
    default:
        return -EINVAL;
    }
}

static int parse_where(const char *name, const char *value, struct io_fault *f, unsigned *given)
{
    static const char *const names[] = {"from", "to", "after", "times"};
    unsigned i = 0;

    while (i < 4 && strcmp(name, names[i]) != 0)
        i++;
    if (i == 4 || !value || (*given & 1u << i))
        return -EINVAL;
    *given |= 1u << i;
    if (i < 2)
        return parse_number(value, INT64_MAX, i == 0 ? &f->from : &f->to);
    return parse_u32(value, i == 2 ? &f->after : &f->times);
}

/* Changes the text. */
static int parse_one(char *text, struct io_fault *ret)
{
    struct io_fault f = {.kind = IO_FAULT_ERROR};
    char *field, *who = strsep(&text, ":");
    unsigned given = 0;
    int r;

    f.reads = strcmp(who, "read") == 0 || strcmp(who, "any") == 0;
    f.writes = strcmp(who, "write") == 0 || strcmp(who, "any") == 0;
    for (bool kind = true; text || kind; kind = false) {
        if (!text)
            return -EINVAL;
        field = strsep(&text, ":");
        who = strsep(&field, "=");
        r = kind ? parse_kind(who, field, &f) : parse_where(who, field, &f, &given);
        if (r < 0)
            return r;
    }
    /* "from" alone would mean nothing, "to=0" everything */
    if (!fault_valid(&f) || ((given & 1) && !f.to) || ((given & 2) && !f.to))
        return -EINVAL;
    *ret = f;
    return 0;
}

static int parse_all(char *text, struct io_fault *ret, uint32_t max)
{
    uint32_t n = 0;

    while (text) {
        if (n == max || parse_one(strsep(&text, ","), &ret[n]) < 0)
            return -EINVAL;
        n++;
    }
    return (int)n;
}

int io_fault_parse(const char *text, struct io_fault *ret, uint32_t max)
{
    struct io_fault *faults;
    char *copy;
    int r = -ENOMEM;

    if (!*text)
        return 0;
    copy = strdup(text);
    faults = calloc(max ? max : 1, sizeof(*faults));
    if (copy && faults)
        r = parse_all(copy, faults, max);
    if (r > 0)
        memcpy(ret, faults, (size_t)r * sizeof(*faults));
    free(copy);
    free(faults);
    return r;
}
