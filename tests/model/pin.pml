/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pin, evict, reuse: hazard counters across processes (promises I1 and I3).
 *
 * One index entry, two slots, two readers that look for object A, one core thread that evicts and
 * fills the entry with A or with B again and again. Nothing is bounded: readers and core loop for
 * ever, any number of readers and daemons die.
 *
 * Memory is TSO: each process has a store buffer that drains at any time, in order; a full fence
 * waits until it is empty. The kernel drains the buffer of a process before it reports its death.
 *
 * -DNAME=0 removes one ingredient; tests/model/run checks that each removal is found out.
 */
#ifndef RFENCE
#define RFENCE 1    /* R3 */
#endif
#ifndef REREAD
#define REREAD 1    /* R4: the word is read again */
#endif
#ifndef REREAD_SLOT
#define REREAD_SLOT 1    /* R4: and must name the pinned slot, not just be LIVE */
#endif
#ifndef KEYCHECK
#define KEYCHECK 1    /* R4: the whole key is compared under the pin; 0: at R1, before it */
#endif
#ifndef PRECHECK
#define PRECHECK 1    /* A0 */
#endif
#ifndef CFENCE
#define CFENCE 1    /* A2 */
#endif
#ifndef SCAN
#define SCAN 1    /* A3 */
#endif
#ifndef RESTORE
#define RESTORE 1    /* A5; 0: a successor frees what it finds LEAVING */
#endif
#ifndef MAPALL
#define MAPALL 1    /* A6; 0: a successor evicts with only some counters mapped */
#endif
#ifndef SWEEPLATE
#define SWEEPLATE 1    /* A7; 0: a hang-up is taken for a death */
#endif
#ifndef GENS
#define GENS 2    /* generations before the word repeats */
#endif
#ifdef BUDGET    /* evictions in all; with GENS > BUDGET the generation never repeats */
#define MAY_EVICT budget > 0
byte budget = BUDGET;
#else
#define MAY_EVICT true
#endif

#define READERS 2
#define SLOTS 2
#define A 1    /* two keys that begin alike: the comparison of a first part at R1 tells nothing */
#define B 2

/* the 8-byte word of an entry */
#define EMPTY 0
#define LIVE 1
#define LEAVING 2
#define word_of(state, gen, slot) ((state) | ((slot) << 2) | ((gen) << 3))
#define state_of(w) ((w) & 3)
#define slot_of(w) (((w) >> 2) & 1)
#define gen_of(w) ((w) >> 3)
#define with_state(w, state) (((w) & ~3) | (state))

byte word = word_of(LIVE, 0, 0);
byte key = A;
byte data[SLOTS] = A;    /* bytes in each slot */
#define pin(reader, slot) pins[(reader) * SLOTS + (slot)]
byte pins[READERS * SLOTS];    /* counters in the session segments */
bool dead[READERS];    /* the pidfd is readable */

/* Store buffers. Deeper ones add nothing: after each store that a later load depends on comes a
   fence, and what the others store only arrives later, as if its owner were slower. */
chan rbuf[READERS] = [1] of { byte, byte };    /* slot, counter */
chan cbuf = [2] of { bool, byte };    /* is it the key, value */

active proctype buffers()
{
    byte s, v;
    bool is_key;
end:
    do
    :: atomic { rbuf[0]?s, v -> pin(0, s) = v; s = 0; v = 0 }
    :: atomic { rbuf[1]?s, v -> pin(1, s) = v; s = 0; v = 0 }
    :: atomic {
        cbuf?is_key, v ->
        if
        :: is_key -> key = v
        :: else -> word = v
        fi;
        is_key = false; v = 0
    }
    od
}

/* one operation, or SIGKILL instead of it */
#define step(...) if :: __VA_ARGS__ :: goto killed fi

proctype reader(byte me)
{
    byte w;
again:
    step(atomic { w = word; if :: state_of(w) == LIVE :: else -> w = 0; goto again fi }); /* R1 */
#if !KEYCHECK
    step(atomic { if :: key == A :: else -> w = 0; goto again fi });
#endif
    step(rbuf[me]!slot_of(w), 1);    /* R2 */
#if RFENCE
    step(empty(rbuf[me]));    /* R3 */
#endif
#if REREAD
#if REREAD_SLOT
    step(atomic { if :: word == w :: else -> goto drop fi });    /* R4 */
#else
    step(atomic { if :: state_of(word) == LIVE :: else -> goto drop fi });
#endif
#endif
#if KEYCHECK
    step(atomic { if :: key == A :: else -> goto drop fi });    /* R4 */
#endif
    /* the pin holds: neither the bytes nor the key may change under it */
    step(assert(data[slot_of(w)] == A && key == A));
    step(assert(data[slot_of(w)] == A && key == A));
drop:
    step(atomic { rbuf[me]!slot_of(w), 0; w = 0 });    /* R5 */
    goto again;
killed:
    atomic { empty(rbuf[me]) -> w = 0; dead[me] = true };
    atomic {    /* swept: the place of a new session, and nothing of the old one is left (I4) */
        !dead[me] -> assert(!SWEEPLATE || pin(me, 0) + pin(me, 1) == 0); goto again
    }
}

/* one operation of the daemon, or SIGKILL instead of it */
#define cstep(...) if :: __VA_ARGS__ :: goto crashed fi
#define pinned(reader, slot) (mapped[reader] && pin(reader, slot) != 0)

proctype core()
{
    byte w;    /* what this thread stored last; it is the only writer */
    bool mapped[READERS];
    byte i;
crashed:
    atomic {
        empty(cbuf) ->    /* the successor has taken the lock that the dead daemon held */
        w = word; mapped[0] = false; mapped[1] = false; i = 0
    };
#if RESTORE
    if
    :: state_of(w) == LEAVING ->    /* A5 */
        cstep(atomic { w = with_state(w, LIVE); cbuf!false, w })
    :: else
    fi;
#else
    if
    :: state_of(w) == LEAVING -> goto free
    :: else
    fi;
#endif
    cstep(mapped[0] = true);    /* A6 */
#if !MAPALL
    if
    :: goto serve
    :: true
    fi;
#endif
    cstep(mapped[1] = true);
serve:
    if
    :: state_of(w) == LIVE && MAY_EVICT -> goto evict
    :: state_of(w) == EMPTY -> goto fill
    :: goto sweep
    :: goto crashed
    fi;

evict:
#if PRECHECK
    cstep(atomic { if :: pinned(0, slot_of(w)) -> goto serve :: else fi });    /* A0 */
    cstep(atomic { if :: pinned(1, slot_of(w)) -> goto serve :: else fi });
#endif
    cstep(atomic { w = with_state(w, LEAVING); cbuf!false, w });    /* A1 */
#if CFENCE
    cstep(empty(cbuf));    /* A2 */
#endif
#if SCAN
    cstep(atomic { if :: pinned(0, slot_of(w)) -> goto unhide :: else fi });    /* A3 */
    cstep(atomic { if :: pinned(1, slot_of(w)) -> goto unhide :: else fi });
#endif
free:
    cstep(atomic {    /* A4 */
        w = word_of(EMPTY, (gen_of(w) + 1) % GENS, 0); cbuf!false, w;
#ifdef BUDGET
        budget--
#endif
    });
    goto serve;
unhide:
    cstep(atomic { w = with_state(w, LIVE); cbuf!false, w });    /* A3, a counter was not zero */
    goto serve;

fill:    /* reserve, write and commit in one; commit.pml has the details */
    if
    :: i = 0
    :: i = 1
    fi;
    w = word_of(EMPTY, gen_of(w), i);
    if
    :: cstep(atomic { data[i] = A; cbuf!true, A })
    :: cstep(atomic { data[i] = B; cbuf!true, B })
    fi;
    cstep(atomic { w = with_state(w, LIVE); cbuf!false, w; i = 0 });
    goto serve;

sweep:    /* A7 */
    if
    :: i = 0
    :: i = 1
    fi;
#if SWEEPLATE
    if
    :: dead[i]
    :: !dead[i] -> i = 0; goto serve
    fi;
#endif
    cstep(pin(i, 0) = 0);
    cstep(pin(i, 1) = 0);
    cstep(atomic { mapped[i] = true; dead[i] = false; i = 0 });
    goto serve
}

init
{
    atomic { run reader(0); run reader(1); run core() }
}
