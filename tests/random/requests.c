/* SPDX-License-Identifier: Apache-2.0 */
/* Request rings: posted by a process, served by the core, collected later. */
#include <errno.h>
#include <string.h>

#include "core.h"
#include "fail.h"

static bool has_rings(struct run *r, int process)
{
    return r->process[process].entries && can_ask(r, process);
}

/* Also one that has hung up: its requests wait until it is back. */
static bool has_room(struct run *r, int process)
{
    const struct process *p = &r->process[process];

    return p->entries && !p->doomed && p->n_posted < p->entries;
}

static void fill_random(struct run *r, int process, struct posted *q)
{
    int pool = (int)rng_below(&r->rng, MODEL_POOLS);

    *q = (struct posted){.pool = pool, .user_data = rng_next(&r->rng)};
    if (rng_once_in(&r->rng, 40))
        q->op = (uint8_t)rng_between(&r->rng, SHM_CANCEL + 1, 255);
    else
        q->op = (uint8_t)rng_between(&r->rng, SHM_RESERVE, SHM_OBSERVE);
    if (rng_once_in(&r->rng, 40))
        q->pool = MODEL_NONE;
    run_random_reserve(r, process, pool, &q->reserve);
    run_random_commit(r, process, pool, &q->commit);
    q->commit.meta &= ~(uint64_t)1;
    q->n_keys = rng_below(&r->rng, SHM_OBSERVE_KEYS + 3); /* also more than there are */
    q->epoch = r->process[process].epoch[r->model.pool[pool].space];
    for (uint32_t i = 0; i < SHM_OBSERVE_KEYS; i++)
        q->keys[i] = (int)rng_below(&r->rng, MODEL_KEYS);
}

static void write_commit(const struct posted *q, struct shm_request *to)
{
    uint8_t user[SHM_USER_BYTES];
    struct commit w;

    run_fill_commit(&q->commit, user, &w);
    to->ticket = w.ticket;
    to->part = (uint16_t)w.part;
    to->commit.bytes = w.bytes;
    to->commit.position = w.position;
    to->commit.layout = w.layout;
    to->commit.checksum = w.checksum;
    to->commit.user_bytes = w.user_bytes;
    memcpy(to->commit.user, user, sizeof(user));
}

static void write_request(struct run *r, const struct posted *q, struct shm_request *to)
{
    *to = (struct shm_request){.op = q->op, .user_data = q->user_data};
    to->pool = q->pool == MODEL_NONE ? CORE_MAX_POOLS + 1 : (uint32_t)q->pool;
    if (q->op == SHM_RESERVE) {
        to->epoch = q->reserve.epoch;
        to->tenant = q->reserve.tenant;
        to->reserve.key = r->keys[q->reserve.key];
        if (q->reserve.parent != MODEL_NONE) {
            to->flags = SHM_HAS_PARENT;
            to->reserve.parent = r->keys[q->reserve.parent];
        }
    } else if (q->op == SHM_COMMIT) {
        write_commit(q, to);
    } else if (q->op == SHM_OBSERVE) {
        to->epoch = q->epoch;
        to->observe.n = q->n_keys;
        for (uint32_t i = 0; i < SHM_OBSERVE_KEYS; i++)
            to->observe.keys[i] = r->keys[q->keys[i]];
    }
}

void op_post(struct run *r)
{
    int process = run_pick(r, has_room);
    struct process *p;
    uint32_t n = 0;

    if (process == MODEL_NONE)
        return;
    p = &r->process[process];
    do {
        struct posted *q = &p->posted[(p->first_posted + p->n_posted) % RUN_RING];

        fill_random(r, process, q);
        if (q->op == SHM_COMMIT && q->pool != MODEL_NONE)
            run_prepare_commit(r, &q->commit);
        write_request(r, q, &p->session->shm->request[shm_ring_at(&p->requests, p->requests.mine)]);
        shm_ring_produce(&p->requests, 1);
        p->n_posted++;
        n++;
    } while (p->n_posted < p->entries && !rng_once_in(&r->rng, 4));
    run_note(r, "process %d posts %u requests", process, n);
}

/* ---- serving */

/* What the answer must be, as far as the core may not choose. RESERVE_NEW may turn out as -ENOSPC. */
static int judge_before(struct run *r, int process, const struct posted *q)
{
    if (q->pool == MODEL_NONE || !r->process[process].attach[q->pool])
        return -EBADF;
    if (!r->model.session[process].writer)
        return -EACCES;
    if (q->op == SHM_RESERVE)
        return model_ask_reserve(&r->model, &q->reserve, run_tick(r, q->pool));
    if (q->op == SHM_COMMIT)
        return model_commit(&r->model, &q->commit, run_tick(r, q->pool));
    return -ENOSYS;
}

static void judge_observe(struct run *r, int process, const struct posted *q)
{
    uint32_t n = q->n_keys < SHM_OBSERVE_KEYS ? q->n_keys : SHM_OBSERVE_KEYS;

    if (q->pool == MODEL_NONE || !r->process[process].attach[q->pool])
        return;
    while (n--)
        model_use(&r->model, q->pool, q->keys[n], q->epoch, run_tick(r, q->pool));
}

static void judge_answer(struct run *r, int process, const struct posted *q, int expected)
{
    struct process *p = &r->process[process];
    const struct shm_completion *ring = shm_completion_array(p->session->shm, p->entries);
    const struct shm_completion *c =
        &ring[shm_ring_at(&p->completions, p->completions.mine + p->n_answers)];

    p->n_answers++;
    expect(shm_ring_waiting(&p->completions) == p->n_answers && c->user_data == q->user_data,
           "process %d: the answer is to another request", process);
    run_note(r, " %u:%d", q->op, c->status);
    if (q->op != SHM_RESERVE || expected == -EBADF || expected == -EACCES) {
        expect(c->status == expected, "process %d: request %u was answered %d, not %d", process,
               q->op, c->status, expected);
        return;
    }
    model_reserved(&r->model, &q->reserve, expected, c->status, c->slot, c->ticket,
                   run_tick(r, q->pool));
    if (c->status == RESERVE_NEW)
        run_keep_ticket(r, q->pool, c->ticket);
    r->granted += c->status == RESERVE_NEW;
    r->refused += c->status == -ENOSPC;
}

static void serve_one(struct run *r, int process)
{
    struct process *p = &r->process[process];
    const struct posted *q = &p->posted[p->first_posted % RUN_RING];
    int expected = 0, got;

    run_begin(r, q->pool == MODEL_NONE ? 0 : q->pool);
    r->interleave = q->op == SHM_RESERVE;
    if (q->op != SHM_OBSERVE)
        expected = judge_before(r, process, q);
    got = session_serve(p->session, 1);
    expect(got == 1, "process %d: a request waits and is not served: %d", process, got);
    if (q->op == SHM_OBSERVE)
        judge_observe(r, process, q);
    run_gone(r, q->op == SHM_RESERVE && expected == RESERVE_NEW ? M_EVICT : M_NOT_AT_ALL);
    if (q->op != SHM_OBSERVE)
        judge_answer(r, process, q, expected);
    run_check(r);
    p->first_posted++;
    p->n_posted--;
}

void op_serve(struct run *r)
{
    int process = run_pick(r, has_rings);
    struct process *p;
    uint32_t n = rng_between(&r->rng, 1, RUN_RING);

    if (process == MODEL_NONE)
        return;
    p = &r->process[process];
    run_note(r, "process %d is served, %u wait:", process, p->n_posted);
    while (n-- && process_waits(p))
        serve_one(r, process);
    if (!process_waits(p))
        expect(session_serve(p->session, 1) == 0, "served without a request or room to answer");
}

void op_collect(struct run *r)
{
    int process = run_pick(r, has_rings);
    struct process *p;
    uint32_t n;

    if (process == MODEL_NONE)
        return;
    p = &r->process[process];
    n = rng_below(&r->rng, p->n_answers + 1);
    run_note(r, "process %d collects %u answers of %u", process, n, p->n_answers);
    shm_ring_consume(&p->completions, n);
    p->n_answers -= n;
}

void op_break_ring(struct run *r)
{
    int process = run_pick(r, has_rings);
    struct process *p;

    if (process == MODEL_NONE || !rng_once_in(&r->rng, 4))
        return;
    p = &r->process[process];
    if (p->n_answers == p->entries)
        return;
    run_note(r, "process %d spoils its ring", process);
    atomic_store(&p->session->shm->requests.tail,
                 p->requests.mine - p->n_posted + p->entries + 1 + rng_below(&r->rng, 1u << 31));
    expect(session_serve(p->session, 8) == -EPROTO && p->session->broken,
           "a ring that makes no sense is served");
    session_hang_up(p->session);
    r->model.session[process].state = M_HUNG_UP;
    p->doomed = true;
}
