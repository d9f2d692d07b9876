/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions come, hang up, come back, say good-bye, die, destroy their memory. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core.h"
#include "fail.h"

static uint32_t count_sessions(const struct run *r)
{
    uint32_t n = 0;

    for (int i = 0; i < MODEL_SESSIONS; i++)
        n += r->process[i].session != NULL;
    return n;
}

/* The engine that a session with this token joins. */
static int engine_of(struct run *r, const char *token)
{
    for (int i = 0; i < MODEL_SESSIONS; i++) {
        const struct process *p = &r->process[i];

        if (token[0] && p->session && strcmp(p->token, token) == 0 &&
            model_engine_lives(&r->model, r->model.session[i].engine))
            return r->model.session[i].engine;
    }
    return model_engine_of(&r->model);
}

static void fill_process(struct run *r, struct process *p, struct session *s, const char *token)
{
    *p = (struct process){.session = s, .alive = true, .pid = s->pid, .entries = s->ring_entries};
    memcpy(p->cookie, s->cookie, sizeof(p->cookie));
    snprintf(p->token, sizeof(p->token), "%s", token);
    for (int i = 0; i < MODEL_SPACES; i++)
        p->epoch[i] = r->model.space[i].epoch;
    if (!p->entries)
        return;
    p->requests = (struct shm_cursor){.ring = &s->shm->requests, .entries = p->entries};
    p->completions = (struct shm_cursor){.ring = &s->shm->completions, .entries = p->entries};
}

void op_new_session(struct run *r)
{
    static const char *const tokens[] = {"", "", "one", "two"};
    const char *token = tokens[rng_below(&r->rng, 4)];
    struct session_spec spec = {
        .pid = r->next_pid++,
        .start_time = 77,
        .role = rng_once_in(&r->rng, 8) ? ROLE_READER : ROLE_WRITER,
        .client = "random",
        .token = (const uint8_t *)token,
        .token_len = (uint32_t)strlen(token),
        .ring_entries = rng_once_in(&r->rng, 4) ? 0 : rng_between(&r->rng, 1, RUN_RING),
    };
    struct session *s = NULL;
    int i = 0, engine, got;

    while (i < MODEL_SESSIONS && r->process[i].session)
        i++;
    engine = engine_of(r, token);
    got = session_new(r->core, &spec, &s);
    run_note(r, "a session for process %d of engine \"%s\"%s: %d", i, token,
             spec.role == ROLE_READER ? ", reader" : "", got);
    if (count_sessions(r) >= r->max_sessions || i == MODEL_SESSIONS) {
        expect(got == -EUSERS, "one session more than max_sessions: %d", got);
        return;
    }
    expect(got == 0, "no session: %d", got);
    model_attach(&r->model, i, engine, spec.role == ROLE_WRITER);
    fill_process(r, &r->process[i], s, token);
}

void op_attach(struct run *r)
{
    int process = run_pick(r, can_ask), pool = (int)rng_below(&r->rng, MODEL_POOLS);
    struct attach *a;
    struct process *p;

    if (process == MODEL_NONE)
        return;
    p = &r->process[process];
    run_note(r, "process %d opens pool %d", process, pool);
    expect(session_attach(p->session, run_pool(r, pool), true, &a) == 0, "cannot attach");
    expect(!p->attach[pool] || p->attach[pool] == a, "two attaches of one session and pool");
    p->attach[pool] = a;
    p->epoch[r->model.pool[pool].space] = r->model.space[r->model.pool[pool].space].epoch;
}

static bool has_rings(struct run *r, int process)
{
    return r->process[process].entries && can_ask(r, process);
}

void op_hang_up(struct run *r)
{
    int process = run_pick(r, has_rings); /* without memory, the connection is the session */

    if (process == MODEL_NONE)
        return;
    run_note(r, "process %d hangs up", process);
    session_hang_up(r->process[process].session);
    r->model.session[process].state = M_HUNG_UP;
}

static bool is_known(struct run *r, int process)
{
    (void)r;
    (void)process;
    return true;
}

/* With the right cookie and by the same process only. */
void op_resume(struct run *r)
{
    int process = run_pick(r, is_known);
    struct process *p;
    struct session *s;
    uint8_t cookie[16];

    if (process == MODEL_NONE)
        return;
    p = &r->process[process];
    memcpy(cookie, p->cookie, sizeof(cookie));
    expect(!session_find(r->core, cookie, sizeof(cookie), p->pid, 78) &&
               !session_find(r->core, cookie, sizeof(cookie), p->pid + 1, 77) &&
               !session_find(r->core, cookie, sizeof(cookie) - 1, p->pid, 77),
           "a session was taken up by somebody else");
    s = session_find(r->core, cookie, sizeof(cookie), p->pid, 77);
    expect(s == p->session, "process %d does not find its session", process);
    cookie[rng_below(&r->rng, sizeof(cookie))] ^= 1;
    expect(!session_find(r->core, cookie, sizeof(cookie), p->pid, 77), "found by a wrong cookie");
    if (p->doomed)
        return;
    run_note(r, "process %d is back", process);
    s->state = SESSION_ATTACHED;
    r->model.session[process].state = M_ATTACHED;
    for (int i = 0; i < MODEL_SPACES; i++)
        p->epoch[i] = r->model.space[i].epoch;
}

/* Dead processes still have a session while it lingers; whoever notices second changes nothing. */
void op_end_session(struct run *r)
{
    int process = (int)rng_below(&r->rng, MODEL_SESSIONS);
    struct process *p = &r->process[process];
    bool died = !can_ask(r, process) || rng_once_in(&r->rng, 2);

    if (!p->session)
        return;
    run_note(r, "process %d %s", process, !p->alive ? "is dead still" : died ? "dies" : "says bye");
    p->alive = false;
    run_begin(r, 0);
    session_end(p->session, died);
    model_end(&r->model, process, died);
    run_end(r, M_NOT_AT_ALL);
}

/* Takes the memory away from under the daemon. */
void op_truncate(struct run *r)
{
    int process = run_pick(r, can_ask), pool = (int)rng_below(&r->rng, MODEL_POOLS);
    struct process *p;

    if (process == MODEL_NONE || !rng_once_in(&r->rng, 3))
        return;
    p = &r->process[process];
    if (rng_once_in(&r->rng, 3) && p->entries) {
        run_note(r, "process %d truncates its rings", process);
        expect(ftruncate(p->session->segment.fd, 0) == 0, "cannot truncate");
        p->doomed = true;
    } else if (p->attach[pool] && p->attach[pool]->segment.fd >= 0 && !p->has_socket_pins[pool]) {
        run_note(r, "process %d truncates its pins of pool %d", process, pool);
        expect(ftruncate(p->attach[pool]->segment.fd, 0) == 0, "cannot truncate");
        p->doomed = true;
        run_drop_pins(r, process, pool);
        model_lose(&r->model, process, pool);
    }
}
