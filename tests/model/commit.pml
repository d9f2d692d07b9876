/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reserve, commit, and the daemon killed anywhere in between, any number of times: the successor
 * replays the requests that are not consumed (promises I1, I4).
 *
 * Two slots, two keys, objects of two parts. Session 0 reserves and writes part 0 while session 1
 * of the same engine writes part 1; session 2 is an engine of its own and writes both parts of any
 * key. The core thread evicts whatever is live whenever it likes; pins are left to pin.pml.
 * Everything here but the locals of the core is shared memory that outlives it. Of a dead process
 * all stores arrive, in order, so there are no store buffers: a crash is a cut between two stores.
 *
 * Claims: an object becomes visible exactly once, with all its parts in, never before; nobody
 * writes into a slot that is visible or another's; each request is answered, once, and each commit
 * with 0; at rest each slot is free or live.
 *
 * -DNAME=0 removes one ingredient; tests/model/run checks that each removal is found out.
 */
#ifndef TABLEFIRST
#define TABLEFIRST 1    /* C1 before C2; 0: a slot is granted, then reserved in the slot table */
#endif
#ifndef ALLPARTS
#define ALLPARTS 1    /* C4 waits for all parts; 0: the first part that comes makes it visible */
#endif
#ifndef PARTSFIRST
#define PARTSFIRST 1    /* C3 before C4; 0: visible, then noted in the slot table */
#endif
#ifndef LIVELAST
#define LIVELAST 1    /* C4 before C5; 0: live in the slot table, then visible */
#endif
#ifndef CONSUMELAST
#define CONSUMELAST 1    /* C6 before C7; 0: consumed, then answered */
#endif
#ifndef REBUILD
#define REBUILD 1    /* C8 */
#endif
#ifndef ANSWERED
#define ANSWERED 1    /* C9: a request that is answered is not replayed */
#endif
#ifndef COMMITSFIRST
#define COMMITSFIRST 1    /* C10: before anything is granted or evicted */
#endif
#ifndef REPLAY
#define REPLAY 1    /* C11: a commit whose entry already names the slot answers 0 */
#endif
#ifndef REGRANT
#define REGRANT 1    /* C12: a reserve that already has a slot gets the same */
#endif

#define SLOTS 2
#define KEYS 2
#define OPS 3    /* reserve operations: 1 of sessions 0 and 1, 2 of session 2; 0 is nobody */

/* slot table */
#define FREE 0
#define RESERVED 1
#define LIVE 2
byte st_state[SLOTS], st_op[SLOTS], st_key[SLOTS], st_parts[SLOTS];

/* index: slot + 1, or EMPTY */
#define EMPTY 0
byte word[KEYS];
#define names(key, slot) (word[key] == (slot) + 1)

byte data[2 * SLOTS];    /* part p of slot s at 2 s + p: which operation wrote it */

/* requests and completions */
#define RESERVE 0
#define COMMIT0 1    /* part 0 is written */
#define COMMIT1 2
chan rq[3] = [3] of { byte, byte, byte };    /* kind, operation, slot */
chan cq[3] = [1] of { byte, byte, byte, byte };    /* kind, operation, answer, slot */
#define sequence(kind, op) (3 * (op) + (kind))    /* what tells a request from those around it */
byte newest[3];    /* the request that the newest completion in the ring answers, taken or not */
#define DONE 0
#define NEW 1
#define PENDING 2
#define PRESENT 3
#define STALE 4

/* what the writers know, and the bookkeeping of the claims */
byte key_of[OPS];
byte ticket, ticket_slot;    /* what session 0 tells session 1: operation and slot */
#define NONE 255
byte owner[SLOTS];    /* who was granted the slot and has not made it visible */
bool shown[OPS];    /* it was visible at some time */
byte shown_op[KEYS];    /* the operation that made the key visible */
byte committed[OPS];    /* parts whose commit was answered */
byte finished;

/* Whoever looks a key up sees whole objects. */
#define whole(key) (data[2 * (word[key] - 1)] == shown_op[key] && \
                    data[2 * (word[key] - 1) + 1] == shown_op[key])
active proctype reader()
{
end:
    do
    :: atomic { word[0] != EMPTY -> assert(whole(0)) }
    :: atomic { word[1] != EMPTY -> assert(whole(1)) }
    od
}

inline await(request)
{
    do
    :: atomic {
        cq[me]?kind, op, answer, slot ->
        if
        :: sequence(kind, op) == sequence(request, mine) -> kind = 0; op = 0; break
        :: else -> assert(!ANSWERED)    /* a duplicate: dropped */
        fi
    }
    od
}

inline reserve_slot()
{
    rq[me]!RESERVE, mine, 0;
    await(RESERVE);
    atomic {
        if
        :: answer == NEW -> assert(owner[slot] == 0); owner[slot] = mine
        :: else
        fi
    }
}

inline write_part(part)
{
    atomic {
        assert(owner[slot] == mine && !names(0, slot) && !names(1, slot));
        data[2 * slot + part] = mine
    }
}

inline committed_part(part)
{
    await(part);
    atomic {
        assert(answer == DONE);
        committed[mine]++;
        assert(committed[mine] < 2 || shown[mine])
    }
}

proctype writer(byte me)    /* session 0 */
{
    byte kind, op, answer, slot, mine = 1;
    reserve_slot();
    if
    :: answer == NEW ->
        atomic { ticket_slot = slot; ticket = mine };
        write_part(0);
        rq[me]!COMMIT0, mine, slot;
        committed_part(COMMIT0)
    :: else -> ticket = NONE    /* someone else's: nothing to do */
    fi;
    finished++
}

proctype rank(byte me)    /* session 1 */
{
    byte kind, op, answer, slot, mine;
    atomic { ticket != 0 -> mine = ticket; slot = ticket_slot };
    if
    :: mine != NONE ->
        write_part(1);
        rq[me]!COMMIT1, mine, slot;
        committed_part(COMMIT1)
    :: else
    fi;
    finished++
}

proctype loner(byte me)    /* session 2 */
{
    byte kind, op, answer, slot, mine = 2;
    if
    :: key_of[mine] = 0
    :: key_of[mine] = 1
    fi;
    reserve_slot();
    if
    :: answer == NEW ->
        write_part(0);
        rq[me]!COMMIT0, mine, slot;
        write_part(1);
        rq[me]!COMMIT1, mine, slot;
        committed_part(COMMIT0);
        committed_part(COMMIT1)
    :: else
    fi;
    finished++
}

/* one store of the daemon, or SIGKILL instead of it */
#define step(...) if :: __VA_ARGS__ :: goto crashed fi

#define has_room(i) (len(cq[i]) == 0)
#define servable(i) (len(rq[i]) > 0 && has_room(i))

inline rebuild(s)    /* C8: what the slot table cannot prove is a miss */
{
    if
    :: st_state[s] == RESERVED && st_parts[s] == 3 && names(st_key[s], s) ->
        step(st_state[s] = LIVE)
    :: st_state[s] == LIVE && !names(st_key[s], s) -> step(st_state[s] = FREE)
    :: else
    fi
}

inline rebuild_entry(k)    /* C8 */
{
    if
    :: word[k] != EMPTY && (st_state[word[k] - 1] != LIVE || st_key[word[k] - 1] != k) ->
        step(word[k] = EMPTY)
    :: else
    fi
}

inline reserve_in_table()
{
    step(atomic { st_op[slot] = op; st_key[slot] = key; st_parts[slot] = 0 });    /* C1 */
    step(st_state[slot] = RESERVED)    /* C1: the state comes last */
}

inline note_part()
{
    step(st_parts[slot] = st_parts[slot] | kind)    /* C3; COMMIT0 and COMMIT1 are bits */
}

inline publish()
{
    step(atomic {    /* C4 */
        if
        :: !names(key, slot) ->
            assert(!shown[op]);
            shown[op] = true; shown_op[key] = op; owner[slot] = 0;
            word[key] = slot + 1
        :: else
        fi
    })
}

inline mark_live()
{
    step(st_state[slot] = LIVE)    /* C5 */
}

inline post_completion()    /* C2 if it grants a slot, else C6 */
{
    step(atomic { cq[i]!kind, op, answer, slot; newest[i] = sequence(kind, op) })
}

inline consume()
{
    step(rq[i]?_, _, _)    /* C7 */
}

proctype core()
{
    byte i, kind, op, slot, key, answer;
    byte replayed;    /* rings whose first request was looked at */
crashed:
    atomic { i = 0; kind = 0; op = 0; slot = 0; key = 0; answer = 0; replayed = 0 };
#if REBUILD
    rebuild(0);
    rebuild(1);
    rebuild_entry(0);
    rebuild_entry(1);
#endif

serve:
    atomic {    /* one go: nobody else writes the slot table and the index */
        i = 0; kind = 0; op = 0; slot = 0; key = 0; answer = 0;
        if
        :: replayed < 3 ->
            i = replayed; replayed++;
            if
            :: len(rq[i]) > 0 -> rq[i]?<kind, op, slot>
            :: len(rq[i]) == 0 -> goto serve
            fi;
#if ANSWERED
            if
            :: newest[i] == sequence(kind, op) -> goto answered    /* C9 */
            :: else
            fi;
#endif
#if COMMITSFIRST
            if
            :: kind == RESERVE || !has_room(i) -> goto serve    /* C10 */
            :: else
            fi;
#else
            goto serve;
#endif
        :: else ->
            if
            :: servable(0) -> i = 0
            :: servable(1) -> i = 1
            :: servable(2) -> i = 2
            :: st_state[0] == LIVE -> slot = 0; goto evict
            :: st_state[1] == LIVE -> slot = 1; goto evict
            :: finished == 3 -> goto rest
            fi;
            rq[i]?<kind, op, slot>
        fi;
        key = key_of[op];
        if
        :: kind == RESERVE -> goto reserve
        :: else
        fi;

        /* commit */
#if REPLAY
        if
        :: names(key, slot) && st_op[slot] == op -> answer = DONE; goto complete    /* C11 */
        :: else
        fi;
#endif
        if
        :: st_state[slot] != RESERVED || st_op[slot] != op -> answer = STALE; goto complete
        :: else
        fi
    };
#if PARTSFIRST
    note_part();
    if
#if ALLPARTS
    :: st_parts[slot] != 3
#endif
    :: else ->
#if LIVELAST
        publish();
        mark_live()
#else
        mark_live();
        publish()
#endif
    fi;
#else
    if
    :: (st_parts[slot] | kind) != 3 -> note_part()
    :: else -> publish(); note_part(); mark_live()
    fi;
#endif
    answer = DONE;

complete:
#if CONSUMELAST
    post_completion();
answered:
    consume();
#else
    consume();
    post_completion();
    goto serve;
answered:
    consume();
#endif
    goto serve;

reserve:
    atomic {
        if
        :: word[key] != EMPTY -> answer = PRESENT; goto complete
        :: else
        fi;
        answer = NEW;
#if REGRANT
        if
        :: st_state[0] == RESERVED && st_op[0] == op -> slot = 0; goto complete    /* C12 */
        :: st_state[1] == RESERVED && st_op[1] == op -> slot = 1; goto complete
        :: else
        fi;
#endif
        if
        :: st_state[0] == RESERVED && st_key[0] == key -> answer = PENDING; goto complete
        :: st_state[1] == RESERVED && st_key[1] == key -> answer = PENDING; goto complete
        :: else
        fi;
        if
        :: st_state[0] == FREE -> slot = 0
        :: st_state[1] == FREE -> slot = 1
        fi
    };
#if TABLEFIRST
    reserve_in_table();
    goto complete;
#else
    post_completion();
    reserve_in_table();
    consume();
    goto serve;
#endif

evict:
    step(word[st_key[slot]] = EMPTY);    /* A4 */
    step(st_state[slot] = FREE);
    goto serve;

rest:
    assert(st_state[0] != RESERVED && st_state[1] != RESERVED);
    assert(!ANSWERED || len(rq[0]) + len(rq[1]) + len(rq[2]) == 0);
    assert(!ANSWERED || len(cq[0]) + len(cq[1]) + len(cq[2]) == 0)
}

init
{
    atomic { run writer(0); run rank(1); run loner(2); run core() }
}
