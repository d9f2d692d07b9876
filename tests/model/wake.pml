/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sleep and wake: nobody sleeps for ever while a request or a completion waits for him (I5).
 *
 * Two workers post requests and wait for completions, or leave without waiting; one core thread
 * answers. Either side sleeps in poll() on its end of the control socket and is woken by a small
 * non-blocking message; EAGAIN means that one is already pending. The handshake is the same in both
 * directions: the sleeper is the core (flag `sleeping`, rings of requests) or a worker (flag
 * `waiting`, its ring of completions).
 *
 * Memory is TSO: each process has a store buffer that drains at any time, in order; a full fence
 * waits until it is empty, and so does sending a message. Workers run for ever or stop at any time.
 * By default there are two of them with one request under way each; -DWORKERS=1 -DDEPTH=2 is the
 * other case that fits into memory.
 *
 * A lost wake-up is an invalid end state: someone is stuck in poll(). The core may end only when
 * the workers have left and every request is answered.
 *
 * -DNAME=0 removes one ingredient; tests/model/run checks that each removal is found out.
 */
#ifndef CORE_SFENCE
#define CORE_SFENCE 1    /* S2, the core sleeps */
#endif
#ifndef CORE_RESCAN
#define CORE_RESCAN 1    /* S3, the core sleeps */
#endif
#ifndef CORE_DRAIN
#define CORE_DRAIN 1    /* S5, the core sleeps; 0: messages are read after S3, not before S1 */
#endif
#ifndef CORE_WFENCE
#define CORE_WFENCE 1    /* W2, the core wakes a worker */
#endif
#ifndef WORKER_SFENCE
#define WORKER_SFENCE 1    /* S2, a worker sleeps */
#endif
#ifndef WORKER_RESCAN
#define WORKER_RESCAN 1    /* S3, a worker sleeps */
#endif
#ifndef WORKER_DRAIN
#define WORKER_DRAIN 1    /* S5, a worker sleeps */
#endif
#ifndef WORKER_WFENCE
#define WORKER_WFENCE 1    /* W2, a worker wakes the core */
#endif

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef DEPTH
#define DEPTH 1    /* requests of a worker under way */
#endif
#define MOD (2 * DEPTH)    /* sequence numbers repeat */
#define next(n) (((n) + 1) % MOD)

byte requests[2];    /* tail of the request ring, written by the worker */
byte completions[2];    /* tail of the completion ring, written by the core */
bool sleeping;    /* written by the core */
bool waiting[2];    /* written by the worker */
bool gone[2];
bool to_core[2], to_worker[2];    /* messages pending in the sockets; how many matters to nobody */

#define FLAG 0
#define TAIL 1
/* Store buffers. Deeper ones add nothing: where two stores could stand in one, no load that matters
   comes between the second and the next fence. */
chan wbuf[2] = [1] of { byte, byte };
chan cbuf = [1] of { byte, byte };    /* FLAG, or TAIL + worker; value */

#define arrive(i) wbuf[i]?what, v -> \
        if \
        :: what == FLAG -> waiting[i] = v \
        :: else -> requests[i] = v \
        fi; \
        what = 0; v = 0

active proctype buffers()
{
    byte what, v;
end:
    do
    :: atomic { arrive(0) }
    :: atomic { arrive(1) }
    :: atomic {
        cbuf?what, v ->
        if
        :: what == FLAG -> sleeping = v
        :: else -> completions[what - TAIL] = v
        fi;
        what = 0; v = 0
    }
    od
}

#define fence(buf) empty(buf)
/* W4; the kernel takes a lock, which is a fence */
#define send(buf, box) atomic { empty(buf) -> box = true }

proctype worker(byte me)
{
    byte posted, taken;
    do
    :: (posted + MOD - taken) % MOD < DEPTH ->
        atomic { posted = next(posted); wbuf[me]!TAIL, posted };    /* W1 */
#if WORKER_WFENCE
        fence(wbuf[me]);    /* W2 */
#endif
        if
        :: sleeping -> send(wbuf[me], to_core[me])    /* W3, W4 */
        :: !sleeping
        fi
    :: taken != completions[me] -> taken = completions[me]
    :: taken != posted && taken == completions[me] ->
        wbuf[me]!FLAG, true;    /* S1 */
#if WORKER_SFENCE
        fence(wbuf[me]);    /* S2 */
#endif
#if WORKER_RESCAN
        if
        :: completions[me] != taken -> goto awake    /* S3 */
        :: completions[me] == taken
        fi;
#endif
#if !WORKER_DRAIN
        to_worker[me] = false;
#endif
        to_worker[me];    /* S4 */
awake:
        wbuf[me]!FLAG, false;
#if WORKER_DRAIN
        to_worker[me] = false    /* S5 */
#endif
    :: break    /* leave; the last requests are to be answered all the same */
    od;
    atomic { empty(wbuf[me]) -> gone[me] = true; posted = 0; taken = 0 }
}

#define answer(i) \
    if \
    :: requests[i] != done[i] -> \
        atomic { done[i] = requests[i]; cbuf!TAIL + i, done[i] };    /* W1 */ \
        core_fence;    /* W2 */ \
        if \
        :: waiting[i] -> send(cbuf, to_worker[i])    /* W3, W4 */ \
        :: !waiting[i] \
        fi \
    :: requests[i] == done[i] \
    fi
#if CORE_WFENCE
#define core_fence fence(cbuf)
#else
#define core_fence skip
#endif

proctype core()
{
    byte done[2];
serve:
    answer(0);
    answer(1);
    cbuf!FLAG, true;    /* S1 */
#if CORE_SFENCE
    fence(cbuf);    /* S2 */
#endif
#if CORE_RESCAN
    if
    :: requests[0] != done[0] -> goto awake    /* S3 */
    :: requests[0] == done[0]
    fi;
    if
    :: requests[1] != done[1] -> goto awake
    :: requests[1] == done[1]
    fi;
#endif
#if !CORE_DRAIN
    to_core[0] = false;
    to_core[1] = false;
#endif
    if
    :: to_core[0] || to_core[1]    /* S4 */
    :: gone[0] && gone[1] && requests[0] == done[0] && requests[1] == done[1] -> goto end
    fi;
awake:
    cbuf!FLAG, false;
#if CORE_DRAIN
    to_core[0] = false;    /* S5 */
    to_core[1] = false;
#endif
    goto serve;
end:
    skip
}

init
{
    atomic {
        run worker(0);
#if WORKERS == 2
        run worker(1);
#else
        gone[1] = true;
#endif
        run core()
    }
}
