#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvctl against a real daemon, and, where a real one cannot be brought to it, against a made-up one.

    kvctl.py KVD KVCTL [NAME...]

runs all tests, or those with a NAME in theirs, and ends with "N passed, N failed". Python 3 only. Some tests
change their user and need root; without it they say so and count neither way.
"""
import contextlib
import ctypes
import hashlib
import json
import os
import platform
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

KVD, KVCTL = sys.argv[1:3] if len(sys.argv) > 2 else (None, None)
HERE = os.path.dirname(os.path.abspath(__file__))
NOBODY = 65534
GROUP = 54321  # of no name

OK, FAILED, USAGE, UNREACHABLE, UNHEALTHY, NOT_FOUND, REFUSED = range(7)

COMMANDS = ["status", "ping", "wait", "check", "spaces", "pools", "sessions", "blocks", "why", "stats", "keys",
            "config check", "evict", "flush", "kill", "version", "help"]

passed, failed, skipped = 0, 0, 0
current = ""


def check(what, good, detail=""):
    global passed, failed
    if good:
        passed += 1
    else:
        failed += 1
        print(f"FAIL {current}: {what}\n    {str(detail).strip()[:2000]}")


def equal(what, got, wanted, detail=""):
    check(what, got == wanted, f"got {got!r}, wanted {wanted!r} {detail}")


def skip(why):
    global skipped
    skipped += 1
    print(f"skip {current}: {why}")


# ---- kvctl

class Result:
    def __init__(self, p):
        self.rc, self.out, self.err = p.returncode, p.stdout, p.stderr
        self.both = f"rc {self.rc}\n{self.out}{self.err}"

    def json(self):
        return json.loads(self.out)

    def rows(self):
        return [line.split() for line in self.out.splitlines()]


def kvctl(*args, env=None, **more):
    clean = {k: v for k, v in os.environ.items() if k not in ("KVD_SOCKET", "NO_COLOR")}
    clean.update(env or {})
    return Result(subprocess.run([KVCTL, *args], capture_output=True, text=True, errors="replace", env=clean,
                                 timeout=60, **more))


# ---- the protocol, as far as it is needed here

def varint(n):
    n &= (1 << 64) - 1
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes(out + bytes([n]))


def message(*fields):
    """Of (number, value): a number, text, bytes, or a list of such."""
    out = b""
    for number, value in fields:
        for v in value if isinstance(value, list) else [value]:
            if isinstance(v, int):
                out += varint(number << 3) + varint(v)
            else:
                v = v.encode() if isinstance(v, str) else v
                out += varint(number << 3 | 2) + varint(len(v)) + v
    return out


def parse(data):
    """{number: [value, ...]}"""
    fields, at = {}, 0

    def take():
        nonlocal at
        n = shift = 0
        while True:
            byte = data[at]
            at += 1
            n |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return n

    while at < len(data):
        tag = take()
        value = take()
        if tag & 7 == 2:
            at += value
            value = data[at - value:at]
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def zigzag(n):
    return n >> 1 ^ -(n & 1)


def receive(s):
    def exactly(n):
        data = b""
        while len(data) < n:
            more = s.recv(n - len(data))
            if not more:
                raise EOFError
            data += more
        return data
    return exactly(struct.unpack("<I", exactly(4))[0])


def send(s, data):
    s.sendall(struct.pack("<I", len(data)) + data)


class Worker:
    """A process of an engine, without shared memory."""

    def __init__(self, path, client="worker"):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(path)
        self.id = 0
        hello = self.call(10, message((1, 1), (2, 1), (3, client)))
        self.session = hello[3][0]

    def call(self, body, data):
        self.id += 1
        send(self.socket, message((1, self.id), (body, data)))
        response = parse(parse(receive(self.socket))[1][0])
        status = zigzag(response[2][0])
        if status < 0:
            raise OSError(-status, response.get(3, [b""])[0].decode())
        return parse(response[body][0]) if body in response else {}

    @staticmethod
    def key(name, group=0):
        return message((1, name), (2, group))

    def reserve(self, names, tenant=0, pool=0):
        reply = self.call(34, message((1, pool), (2, 1), (3, [self.key(n) for n in names]), (6, tenant)))
        return [parse(r) for r in reply[1]]

    def put(self, names, tenant=0, pool=0, data=b"x" * 100):
        for n, r in zip(names, self.reserve(names, tenant, pool)):
            self.call(35, message((1, r[2][0]), (2, 0), (3, 0), (4, data), (5, pool)))
            meta = message((1, 4096), (3, tenant))
            self.call(36, message((1, pool), (2, r[2][0]), (3, 0), (4, len(data)), (5, meta)))

    def pin(self, names, pool=0):
        return self.call(31, message((1, pool), (2, 1), (3, [self.key(n) for n in names])))[1][0]

    def close(self):
        self.socket.close()


class Fake:
    """Says whatever one wants it to say."""

    def __init__(self, path, daemon="kvd 0.1.0", status=None, sessions=None, silent=False):
        self.daemon, self.status, self.sessions, self.silent = daemon, status, sessions, silent
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(path)
        self.socket.listen()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self.talk, args=(self.socket.accept()[0],), daemon=True).start()

    def talk(self, s):
        with contextlib.suppress(EOFError, OSError), s:
            while True:
                request = parse(receive(s))
                if self.silent and 10 not in request:
                    continue
                send(s, message((1, self.answer(request))))

    def answer(self, request):
        head = ((1, request[1][0]), (2, 0))
        if 10 in request:
            hello = message((1, 1), (2, b"i" * 16), (3, 7), (5, 3), (9, self.daemon))
            return message(*head, (10, hello))
        if 50 in request and self.status is not None:
            return message(*head, (50, self.status))
        if 51 in request and self.sessions is not None:
            return message(*head, (51, self.sessions))
        if 11 in request:
            return message(*head)
        return message((1, request[1][0]), (2, 2 * 38 - 1), (3, "not known"))  # -ENOSYS

    def close(self):
        self.socket.close()


def fake_pool(free=0, live=100, pinned=0, reserved=0, quarantined=0, backing="tmpfs", page=4096):
    info = message((1, 0), (2, "kv"), (3, 100), (4, 65536), (5, 1), (6, 100), (7, 1), (8, page), (9, backing),
                   (10, "demo"))
    return message((1, info), (2, free), (3, reserved), (4, live), (5, 0), (6, quarantined), (7, pinned), (8, 0),
                   (9, 0))


def fake_status(*pools, state="ready", problems=(), version="0.1.0", hugepages="off", sockets=()):
    space = message((1, "demo"), (2, 1), (5, 1), (6, 1))
    return message((1, version), (2, 4711), (3, 3725), (4, state), (5, list(problems)), (6, space), (7, list(pools)),
                   (8, list(sockets)), (9, 1), (10, 1), (11, "/dev/shm/nothing"), (12, hugepages))


def fake_session(number, state="attached", objects=0, size=0, oldest=0, note=None, client="engine"):
    fields = [(1, number), (2, 1000 + number), (3, 0), (4, "writer"), (5, client), (6, state), (7, 10), (8, objects),
              (9, size), (10, 0), (11, oldest), (13, "demo")]
    return message(*fields, *([(14, note)] if note else []))


# ---- daemons

class Place:
    """A folder, and what is started in it."""

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="kvctl-", dir="/dev/shm")
        os.chmod(self.dir, 0o755)
        self.processes, self.closing = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for thing in self.closing:
            thing.close()
        for p in self.processes:
            with contextlib.suppress(ProcessLookupError):
                p.send_signal(signal.SIGCONT)
            p.terminate()
            p.wait()
        shutil.rmtree(self.dir)

    def path(self, name):
        return os.path.join(self.dir, name)

    def write(self, name, text):
        path = self.path(name.lstrip("/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb" if isinstance(text, bytes) else "w") as f:
            f.write(text)
        return path

    def config(self, daemon="", pool="slot = 64K\nslots = 256", sockets="", spaces="[space demo]"):
        run = self.path("run")
        sockets = sockets or f"[socket all]\npath = {run}/kvd.sock\nrole = admin"
        return self.write("kvd.conf", f"[daemon]\nruntime_dir = {run}\n{daemon or 'hugepages = off'}\n{spaces}\n"
                                      f"[pool demo/kv]\n{pool}\n{sockets.replace('RUN', run)}\n")

    def daemon(self, **config):
        path = self.config(**config)
        log = open(self.path("log"), "w")
        p = subprocess.Popen([KVD, "-c", path], stderr=log)
        log.close()
        self.processes.append(p)
        self.socket = self.path("run/kvd.sock")
        r = kvctl("-s", self.socket, "wait", "--ready", "--timeout", "30")
        if r.rc:
            raise RuntimeError(f"no daemon: {r.both}\n{open(self.path('log')).read()}")
        return p

    def kvctl(self, *args, **more):
        return kvctl("-s", self.socket, *args, **more)

    def worker(self, client="worker"):
        w = Worker(self.socket, client)
        self.closing.append(w)
        return w

    def fake(self, *args, **more):
        self.socket = self.path("fake.sock")
        f = Fake(self.socket, *args, **more)
        self.closing.append(f)


def names(n, first=0):
    return [hashlib.sha256(b"%d" % i).digest() for i in range(first, first + n)]


def by_item(result):
    items = {}
    for i in result.json()["items"]:
        items.setdefault(i["item"], []).append((i["level"], i["text"], i.get("fix", [])))
    return items


# ---- usage

def test_usage():
    equal("nothing", kvctl().rc, USAGE)
    r = kvctl("--help")
    equal("--help", r.rc, OK)
    for name in COMMANDS:
        check(f"--help lists {name}", re.search(rf"^  {name}\b", r.out, re.M), r.out)
        one = kvctl(*name.split(), "--help")
        check(f"{name} --help has an example", one.rc == OK and "\nExample:\n  " in one.out, one.both)
        equal(f"help {name}", kvctl("help", *name.split()).out, one.out)
    for status in range(7):
        check(f"exit status {status} is explained", re.search(rf"^  {status}  ", r.out, re.M))
    check("--version", re.fullmatch(r"kvctl \d+\.\d+\.\d+\n", kvctl("--version").out))


def test_wrong_usage():
    for args, wanted in [
        (["statsu"], 'did you mean "status"'), (["sesions"], 'did you mean "sessions"'),
        (["conf"], 'did you mean "config check"'), (["config"], 'did you mean "config check"'),
        (["xyzzy"], "kvctl --help"), (["blocks"], "too few"), (["ping", "x"], "too many"), (["blocks", "-x", "p"], '"-x"'),
        (["--foo"], '"--foo"'), (["stats", "-i"], '"-i"'), (["-o", "xml", "ping"], "xml"),
        (["--timeout", "0", "ping"], "seconds"), (["--timeout", "1x", "ping"], "seconds"),
        (["--timeout", "nan", "ping"], "seconds"), (["why", "a/b", "abc"], "even number"),
        (["why", "a/b", "gg"], "hexadecimal"), (["why", "a/b", "00" * 33], "2 to 64"), (["why", "a/b", "00:x"], "group"),
        (["kill", "x"], "whole number"), (["evict", "a/b"], "one of the three"),
        (["evict", "a/b", "00", "--count", "1"], "one of the three"), (["blocks", "a/b", "-a", "-n", "1"], "exclude"),
        (["stats", "--count", "1"], "--interval"), (["stats", "--openmetrics", "-o", "json"], "--openmetrics"),
    ]:
        r = kvctl(*args)
        check(f"{args} is wrong usage", r.rc == USAGE and wanted in r.err and r.err.startswith("kvctl: ") and not r.out,
              r.both)


# ---- without a daemon

def test_no_daemon():
    with Place() as p:
        missing = p.path("none.sock")
        for args in [["status"], ["ping"], ["pools"], ["stats"], ["kill", "1"], ["flush", "demo"]]:
            r = kvctl("-s", missing, *args)
            check(f"{args}: unreachable", r.rc == UNREACHABLE and missing in r.err, r.both)
        r = kvctl("-s", missing, "wait", "--timeout", "0.2")
        check("wait gives up", r.rc == UNREACHABLE and "0.2 s" in r.err, r.both)
        equal("version knows its own", kvctl("-s", missing, "version").rc, OK)
        r = kvctl("ping", env={"KVD_SOCKET": missing})
        check("$KVD_SOCKET", missing in r.err, r.both)
        r = kvctl("-s", p.path("other.sock"), "ping", env={"KVD_SOCKET": missing})
        check("-s is stronger", "other.sock" in r.err, r.both)
        r = kvctl("-s", "/" + "x" * 200, "ping")
        check("a long path", r.rc == FAILED and "107" in r.err, r.both)


def test_check_without_daemon():
    with Place() as p:
        r = kvctl("-s", p.path("none.sock"), "check", "-o", "json")
        items = by_item(r)
        equal("exit status", r.rc, UNHEALTHY)
        equal("healthy", r.json()["healthy"], False)
        level, text, fix = items["daemon"][0]
        check("names the socket and the cure", level == "FAIL" and "none.sock" in text and "start kvd" in fix[0], items)
        check("looks at the machine all the same", {"kernel", "pidfd", "hugepages", "memlock"} <= items.keys(), items)

        s = socket.socket(socket.AF_UNIX)
        s.bind(p.path("stale.sock"))
        s.close()
        items = by_item(kvctl("-s", p.path("stale.sock"), "check", "-o", "json"))
        level, text, fix = items["daemon"][0]
        check("a stale socket", level == "FAIL" and "left over" in text and "restart kvd" in fix[0], items)
        equal("ping of it", kvctl("-s", p.path("stale.sock"), "ping").rc, UNREACHABLE)

        r = kvctl("-s", p.path("none.sock"), "check")
        check("as text", re.search(r"^FAIL  daemon .*\n +fix: ", r.out, re.M), r.out)


# ---- looking

def test_status():
    with Place() as p:
        p.daemon()
        r = p.kvctl("status")
        check("table", r.rc == OK and "ready" in r.out and "demo/kv" in r.out and "64 KiB" in r.out, r.both)
        s = p.kvctl("-o", "json", "status").json()
        equal("schema", s["schema"], 1)
        equal("state", s["state"], "ready")
        equal("pid", s["pid"], p.processes[0].pid)
        pool = s["pools"][0]
        equal("pool", (pool["name"], pool["slot_bytes"], pool["slots"], pool["bytes"], pool["free"]),
              ("demo/kv", 65536, 256, 256 * 65536, 256))
        equal("socket", (s["sockets"][0]["path"], s["sockets"][0]["role"]), (p.socket, "admin"))
        equal("options may stand behind", p.kvctl("status", "-o", "json").json()["pools"], s["pools"])
        equal("and be repeated", p.kvctl("-o", "json", "pools", "-o", "table").rows()[0][0], "POOL")
        for command in COMMANDS[:11]:
            if command in ("status", "ping", "spaces", "pools", "sessions", "stats", "check"):
                equal(f"schema of {command}", p.kvctl(command, "-o", "json").json()["schema"], 1)
        equal("headers", p.kvctl("pools").rows()[0][0], "POOL")
        equal("no headers", p.kvctl("pools", "--no-headers").rows()[0][0], "demo/kv")
        r = p.kvctl("ping")
        check("ping", re.fullmatch(rf"kvd \S+ at {re.escape(p.socket)}: \d+ us\n", r.out), r.both)
        check("version", "kvd " in p.kvctl("version").out)
        equal("wait", p.kvctl("wait").rc, OK)
        check("kvctl says good-bye", "is dead" not in open(p.path("log")).read(), open(p.path("log")).read())


def test_sessions():
    with Place() as p:
        p.daemon()
        w = p.worker(client="bad\x1b[31mname")
        w.put(names(3))
        equal("pinned", w.pin(names(3)), 3)
        rows = {s["session"]: s for s in p.kvctl("sessions", "-o", "json").json()["sessions"]}
        s = rows[w.session]
        equal("what it holds", (s["pinned_objects"], s["pid"], s["spaces"], s["state"]),
              (3, os.getpid(), ["demo"], "attached"))
        check("this command", any(s.get("note") == "this command" for s in rows.values()), rows)
        r = p.kvctl("sessions")
        check("no escape sequences reach the terminal", "\x1b" not in r.out and "name" in r.out, repr(r.out))
        check("sizes for people", re.search(r"\b(KiB|B)\b", r.out), r.out)


def test_blocks():
    with Place() as p:
        p.daemon(daemon="hugepages = off\nmax_frame = 64K\nmax_inline = 32K")  # several messages for the listing
        equal("an empty pool", p.kvctl("blocks", "demo/kv", "-o", "json").json()["blocks"], [])
        w = p.worker()
        w.put(names(200), tenant=5)
        b = p.kvctl("blocks", "demo/kv", "-o", "json").json()
        equal("the limit", (len(b["blocks"]), b["more"], b["pool"]), (100, True, "demo/kv"))
        b = p.kvctl("blocks", "demo/kv", "-n", "7", "-o", "json").json()
        equal("another limit", len(b["blocks"]), 7)
        b = p.kvctl("blocks", "0", "--all", "-o", "json").json()
        equal("all, by number", sorted(x["key"] for x in b["blocks"]), sorted(n.hex() for n in names(200)))
        equal("more", b["more"], False)
        x = b["blocks"][0]
        equal("one", (x["state"], x["bytes"], x["tenant"], x["position"], x["pins"]), ("live", 100, 5, 4096, 0))
        r = p.kvctl("blocks", "demo/kv", "-n", "3")
        check("table", len(r.out.splitlines()) == 4 and "--all" in r.err and names(1)[0].hex() in r.out, r.both)
        r = p.kvctl("blocks", "demo/kw")
        check("a pool that is not there", r.rc == NOT_FOUND and "demo/kv" in r.err, r.both)
        equal("nor is this", p.kvctl("blocks", "9").rc, NOT_FOUND)


def test_why():
    with Place() as p:
        p.daemon()
        w = p.worker()
        a, b, c, d = names(4)
        w.put([a])
        w.reserve([b])
        ticket = w.reserve([c])[0][2][0]
        w.call(37, message((1, 0), (2, ticket)))
        r = p.kvctl("why", "demo/kv", a.hex(), "-o", "json")
        equal("present", (r.rc, r.json()["state"], r.json()["block"]["bytes"]), (OK, "present", 100))
        check("in words", "present" in p.kvctl("why", "demo/kv", a.hex().upper()).out)
        r = p.kvctl("why", "demo/kv", b.hex(), "-o", "json")
        equal("pending", (r.rc, r.json()["state"], r.json()["block"]["session"]), (OK, "pending", w.session))
        r = p.kvctl("why", "demo/kv", c.hex(), "-o", "json")
        equal("aborted", (r.rc, r.json()["state"]), (NOT_FOUND, "aborted"))
        r = p.kvctl("why", "demo/kv", d.hex(), "-o", "json")
        equal("never stored", (r.rc, r.json()["state"]), (NOT_FOUND, "never stored"))
        equal("another group is another key", p.kvctl("why", "demo/kv", a.hex() + ":1").rc, NOT_FOUND)
        equal("group 0 is none", p.kvctl("why", "demo/kv", a.hex() + ":0").rc, OK)
        for name, shown in [(b"\1" * 8, 16), (b"\1" * 9, 32), (b"\1" * 16, 32), (b"\1" * 17, 64),
                            (b"\1" * 31 + b"\0", 64)]:
            w.put([name])
            key = p.kvctl("why", "demo/kv", name.hex(), "-o", "json").json()["key"]
            equal(f"{len(name)} bytes", key, name.hex().ljust(shown, "0"))
        w.put([b"\xab\xcd"])
        r = p.kvctl("why", "demo/kv", "abcd", "-o", "json")
        equal("a short key is padded", (r.rc, r.json()["key"]), (OK, "abcd000000000000"))
        equal("and found as it is shown", p.kvctl("why", "demo/kv", r.json()["name"]).rc, OK)


def test_stats():
    with Place() as p:
        p.daemon()
        w = p.worker()
        w.put(names(5))
        s = p.kvctl("stats", "-o", "json").json()["stats"]
        value = {x["name"]: x["value"] for x in s}
        equal("committed", value["kvd_committed_objects_total"], 5)
        equal("types", {x["type"] for x in s}, {"counter", "gauge"})
        equal("of one pool", {x["pool"] for x in p.kvctl("stats", "demo/kv", "-o", "json").json()["stats"]}, {"demo/kv"})
        check("table", "kvd_slots_live" in p.kvctl("stats").out)
        lines = p.kvctl("stats", "-i", "0.05", "-n", "3", "-o", "json").out.splitlines()
        samples = [json.loads(line)["stats"] for line in lines]
        equal("three documents", len(samples), 3)
        check("the first has no rate", not any("rate" in x for x in samples[0]))
        check("the next have, counters only", all(("rate" in x) == (x["type"] == "counter") for x in samples[1]),
              samples[1])
        r = p.kvctl("stats", "demo/kv", "-i", "0.05", "-n", "2")
        equal("RATE in the second table", [line for line in r.out.splitlines() if "RATE" in line and "NAME" in line],
              [line for line in r.out.splitlines() if line.startswith("NAME")][1:])


def test_openmetrics():
    """What https://prometheus.io/docs/specs/om/open_metrics_spec/ demands."""
    with Place() as p:
        p.daemon(spaces="[space demo]\n[pool demo/more]\nslot = 4K\nslots = 16")
        out = p.kvctl("stats", "--openmetrics").out
        check("ends with # EOF", out.endswith("\n# EOF\n"), out[-80:])
        families, family, kind, seen = [], None, None, set()
        for line in out.splitlines()[:-1]:
            if line.startswith("# TYPE "):
                _, _, family, kind = line.split()
                families.append(family)
                continue
            if line.startswith("# HELP "):
                equal("help belongs to its family", line.split()[2], family)
                continue
            m = re.fullmatch(r'(kvd_[a-z_]+)(\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*\})? (\d+)', line)
            check("a sample", m, line)
            equal("of its family", m[1], family + ("_total" if kind == "counter" else ""))
            check("once", m[1] + (m[2] or "") not in seen, line)
            seen.add(m[1] + (m[2] or ""))
        equal("a family is declared once", [f for f in set(families) if families.count(f) > 1], [])
        check("labels", 'kvd_slots_free{pool="demo/kv",tier="ram"} 256' in out.splitlines(), out)


# ---- acting

def test_evict_keys():
    with Place() as p:
        p.daemon(daemon="hugepages = off\nmax_frame = 64K\nmax_inline = 32K")
        w = p.worker()
        keys = [n.hex() for n in names(4)]
        w.put(names(4))
        w.pin(names(1))
        r = p.kvctl("evict", "demo/kv", keys[1], keys[2], "-o", "json")
        equal("two", (r.rc, r.json()["removed"]), (OK, 2))
        equal("removed", p.kvctl("why", "demo/kv", keys[1], "-o", "json").json()["state"], "removed")
        r = p.kvctl("evict", "demo/kv", keys[0])
        check("a pinned one stays", r.rc == FAILED and "pinned" in r.err, r.both)
        w.put(names(1, 50))
        r = p.kvctl("evict", "demo/kv", keys[1], names(1, 50)[0].hex())
        check("one of two is not there", r.rc == NOT_FOUND and "1 of 2" in r.err and "1 removed" in r.out, r.both)
        many = [n.hex() for n in names(3000, 1000)]
        r = p.kvctl("evict", "demo/kv", *many, keys[3])
        check("more keys than a message takes", r.rc == NOT_FOUND and "3000 of 3001" in r.err, r.both[:300])


def test_evict_coldest_and_tenant():
    with Place() as p:
        p.daemon()
        w = p.worker()
        w.put(names(10), tenant=1)
        w.put(names(20, 100), tenant=2)
        r = p.kvctl("evict", "demo/kv", "--count", "4", "-o", "json")
        equal("the coldest", (r.rc, r.json()["removed"]), (OK, 4))
        equal("are the first", p.kvctl("why", "demo/kv", names(1)[0].hex()).rc, NOT_FOUND)
        r = p.kvctl("evict", "demo/kv", "--tenant", "2", "-o", "json")
        equal("a tenant", r.json()["removed"], 20)
        equal("others stay", len(p.kvctl("blocks", "demo/kv", "-o", "json").json()["blocks"]), 6)
        r = p.kvctl("evict", "demo/kv", "--count", "100")
        check("more than there are", r.rc == OK and "6 removed" in r.out and "no more" in r.err, r.both)
        equal("tenant 0 is one too", p.kvctl("evict", "demo/kv", "--tenant", "0").rc, OK)


def test_flush():
    with Place() as p:  # two pools, one of which takes several steps
        p.daemon(pool="slot = 4K\nslots = 10000",
                 spaces="[space other]\n[pool other/kv]\nslot = 4K\nslots = 16\n"
                        "[space demo]\n[pool demo/more]\nslot = 4K\nslots = 16")
        pools = {x["name"]: x["pool"] for x in p.kvctl("pools", "-o", "json").json()["pools"]}
        w = p.worker()
        for first in range(0, 5000, 500):
            w.put(names(500, first), pool=pools["demo/kv"])
        w.put(names(3), pool=pools["demo/more"])
        w.put(names(3), pool=pools["other/kv"])
        w.pin(names(2), pool=pools["demo/kv"])
        r = p.kvctl("flush", "demo", "-o", "json")
        result = {x["pool"]: (x["removed"], x["pinned"]) for x in r.json()["pools"]}
        equal("the space's pools", result, {"demo/kv": (4998, 2), "demo/more": (3, 0)})
        live = {x["name"]: x["live"] for x in p.kvctl("pools", "-o", "json").json()["pools"]}
        equal("and no other", live, {"demo/kv": 2, "demo/more": 0, "other/kv": 3})
        r = p.kvctl("flush", "dmeo")
        check("a space that is not there", r.rc == NOT_FOUND and "demo" in r.err, r.both)
        r = p.kvctl("flush", "other")
        check("in words", r.out == "other/kv: 3 removed\n", r.both)


def victim(path):
    """Another process with a session: its pid and number."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(Exception):
            worker = Worker(path, "victim")
            os.write(w, str(worker.session).encode())
            time.sleep(600)
        os._exit(1)
    os.close(w)
    with open(r) as f:
        session = os.read(f.fileno(), 16).decode()
    return pid, session


def test_kill():
    with Place() as p:
        p.daemon()
        pid, session = victim(p.socket)
        r = p.kvctl("kill", session)
        check("says whom", r.rc == OK and f"pid {pid}" in r.out, r.both)
        if r.rc:
            os.kill(pid, signal.SIGTERM)
        equal("SIGKILL", os.WTERMSIG(os.waitpid(pid, 0)[1]), signal.SIGKILL)
        equal("a session that is not there", p.kvctl("kill", "4000000").rc, NOT_FOUND)
        own = max(s["session"] for s in p.kvctl("sessions", "-o", "json").json()["sessions"])
        r = p.kvctl("kill", str(own + 1))
        check("not itself", r.rc == USAGE and "itself" in r.err, r.both)


# ---- roles and permissions

def test_roles():
    with Place() as p:
        p.daemon(sockets="[socket a]\npath = RUN/kvd.sock\nrole = admin\n[socket r]\npath = RUN/r.sock\nrole = reader")
        reader = p.path("run/r.sock")
        equal("a reader may ask for the status", kvctl("-s", reader, "status").rc, OK)
        for args in [["sessions"], ["blocks", "demo/kv"], ["why", "demo/kv", "00"], ["evict", "demo/kv", "-n", "1"],
                     ["flush", "demo"], ["kill", "1"]]:
            r = kvctl("-s", reader, *args)
            check(f"but not {args[0]}", r.rc == REFUSED and "admin" in r.err, r.both)
        r = kvctl("-s", reader, "check", "-o", "json")
        level, _, fix = by_item(r)["sessions"][0]
        check("check says which socket shows sessions", r.rc == OK and level == "skip" and p.socket in fix[0], r.both)


def as_nobody():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def test_permission():
    if os.getuid() != 0:
        return skip("needs root, to become nobody")
    with Place() as p:
        p.daemon(sockets=f"[socket a]\npath = RUN/kvd.sock\nrole = admin\nmode = 0660\ngroup = {GROUP}\n"
                         f"[socket b]\npath = RUN/b.sock\nrole = admin\nmode = 0600\ngroup = {GROUP}")
        os.chmod(p.path("run"), 0o755)
        r = p.kvctl("ping", preexec_fn=as_nobody)
        check("ping", r.rc == REFUSED and p.socket in r.err, r.both)
        r = p.kvctl("check", "-o", "json", preexec_fn=as_nobody)
        level, text, fix = by_item(r)["daemon"][0]
        check("the group to join", r.rc == UNHEALTHY and level == "FAIL" and f"usermod -aG {GROUP} nobody" in fix, r.both)
        r = kvctl("-s", p.path("run/b.sock"), "check", "-o", "json", preexec_fn=as_nobody)
        level, text, fix = by_item(r)["daemon"][0]
        check("no group helps", level == "FAIL" and not any("usermod" in f for f in fix) and "sudo" in fix[0], r.both)
        os.chmod(p.path("run"), 0o700)
        r = p.kvctl("check", "-o", "json", preexec_fn=as_nobody)
        level, text, fix = by_item(r)["daemon"][0]
        check("the directory", level == "FAIL" and f"chmod a+x {p.path('run')}" in fix, r.both)


# ---- an unwell daemon

def test_stopped():
    with Place() as p:
        d = p.daemon()
        d.send_signal(signal.SIGSTOP)
        r = p.kvctl("ping", "--timeout", "0.3")
        check("ping", r.rc == UNREACHABLE and "stopped" in r.err, r.both)
        equal("wait", p.kvctl("wait", "--timeout", "0.3").rc, UNREACHABLE)
        items = by_item(p.kvctl("check", "--timeout", "0.3", "-o", "json"))
        check("check", items["daemon"][0][0] == "FAIL" and "answer" in items["daemon"][0][1], items)
        d.send_signal(signal.SIGCONT)
        equal("afterwards", p.kvctl("ping").rc, OK)


def test_degraded():
    with Place() as p:
        p.fake(status=fake_status(fake_pool(free=50, live=50), state="degraded", hugepages="try",
                                  problems=["pool demo/kv has none; fix: do this; not that: gone; fix: do that"]))
        r = p.kvctl("status")
        check("status", r.rc == UNHEALTHY and "degraded" in r.out and "problem: pool demo/kv" in r.out, r.both)
        equal("wait --ready: it serves", p.kvctl("wait", "--ready").rc, OK)
        r = p.kvctl("check", "-o", "json")
        level, text, fix = by_item(r)["problem"][0]
        equal("its problems, and the cures", (r.rc, level, text, fix),
              (UNHEALTHY, "FAIL", "pool demo/kv has none; not that: gone", ["do this", "do that"]))
    with Place() as p:
        p.fake(status=fake_status(fake_pool(), state="starting"))
        equal("wait", p.kvctl("wait").rc, OK)
        r = p.kvctl("wait", "--ready", "--timeout", "0.2")
        check("wait --ready", r.rc == UNHEALTHY and "starting" in r.err, r.both)
    with Place() as p:
        p.fake(silent=True)
        equal("wait for one that is silent", p.kvctl("wait", "--timeout", "0.2").rc, UNHEALTHY)
        r = p.kvctl("status", "--timeout", "0.2")
        equal("status of it", r.rc, UNREACHABLE)


def test_versions():
    with Place() as p:
        p.fake(daemon="kvd 9.9.9", status=fake_status(fake_pool(free=50), version="9.9.9"))
        level, text, fix = by_item(p.kvctl("check", "-o", "json"))["version"][0]
        check("differ", level == "warn" and "9.9.9" in text and "restart kvd" in fix[0], (level, text, fix))
        p.closing.pop().close()
    with Place() as p:
        p.daemon()
        equal("do not", by_item(p.kvctl("check", "-o", "json"))["version"][0][0], "ok")


def test_pins():
    holders = message((1, [fake_session(3, objects=1, size=10), fake_session(4, objects=90, size=9000, oldest=3725,
                                                                            client="hog"), fake_session(5)]))
    for live, pinned, level in [(100, 50, "ok"), (100, 95, "warn"), (100, 100, "FAIL")]:
        with Place() as p:
            p.fake(status=fake_status(fake_pool(live=live, pinned=pinned)), sessions=holders)
            r = p.kvctl("check", "-o", "json")
            got = by_item(r)["pins"][0]
            equal(f"{pinned} of 100 pinned", (got[0], r.rc), (level, UNHEALTHY if level == "FAIL" else OK), r.both)
            if level == "ok":
                continue
            check("names the pool", "demo/kv" in got[1], got)
            check("who holds most comes first", got[2][0].startswith("kvctl kill 4 ") and "hog" in got[2][0] and
                  "1 h 2 min" in got[2][0] and "8.8 KiB" in got[2][0], got)
            check("who holds nothing is not named", not any("kill 5" in f for f in got[2]), got)
    with Place() as p:  # really
        p.daemon(pool="slot = 64K\nslots = 16\nlow_water = 0\nhigh_water = 0")
        w = p.worker(client="hog")
        w.put(names(16))
        equal("pinned", w.pin(names(16)), 16)
        level, text, fix = by_item(p.kvctl("check", "-o", "json"))["pins"][0]
        check("a real pool", level == "FAIL" and f"kvctl kill {w.session} " in fix[0], (level, text, fix))


def test_broken_sessions():
    with Place() as p:
        p.fake(status=fake_status(fake_pool(free=50)),
               sessions=message((1, [fake_session(3), fake_session(4, state="broken", note="nonsense in its ring")])))
        r = p.kvctl("check", "-o", "json")
        level, text, fix = by_item(r)["sessions"][0]
        check("named", level == "warn" and "session 4" in text and "nonsense" in text and "kill 4" in fix[0], r.both)
        equal("a warning is no failure", r.rc, OK)


def test_hostile_daemon():
    with Place() as p:
        p.fake(status=fake_status(fake_pool(free=1), state="degraded", problems=["a\x1b]0;b\x07c\nd"]))
        for command in ("status", "check"):
            r = p.kvctl(command)
            check(f"{command}: no control characters", not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", r.out + r.err), r.both)
    with Place() as p:
        s = socket.socket(socket.AF_UNIX)
        s.bind(p.path("x.sock"))
        s.listen()

        def garbage():
            with contextlib.suppress(OSError):
                while True:
                    c = s.accept()[0]
                    c.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    c.close()
        threading.Thread(target=garbage, daemon=True).start()
        p.closing.append(s)
        r = kvctl("-s", p.path("x.sock"), "ping")
        check("not kvd", r.rc in (FAILED, UNREACHABLE) and "kvd" in r.err, r.both)


# ---- the machine

GOOD = {
    "/proc/sys/kernel/osrelease": "6.1.0-18-amd64\n",
    "/proc/sys/vm/overcommit_memory": "0\n",
    "/proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 9000000 kB\nCommitLimit: 1000 kB\nCommitted_AS: 500 kB\n"
                     "Hugepagesize: 2048 kB\n",
    "/proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/vda rw\n30 22 0:25 / /run rw,nosuid - tmpfs tmpfs rw\n"
                            "31 22 0:26 / /dev/hugepages rw shared:1 - hugetlbfs hugetlbfs rw,pagesize=2M\n",
    "/proc/self/status": "Name: x\nCapEff:\t0000000000000000\n",
    "/proc/self/limits": "Max locked memory         unlimited            unlimited            bytes\n",
    "/proc/self/cgroup": "0::/user.slice/a.scope\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "10\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "9\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages": "0\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages": "0\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages": "0\n",
    "/run/systemd/system/x": "",
    "/run/kvd/x": "",
    "/dev/hugepages/kvd/x": "",
}
# 2 parts of 3 * 1.5 MiB: 3 pages each, since each part is a segment
POOL = "parts = 2\nslot = 3M\nslots = 3"


def examine(pool=POOL, daemon="", **changes):
    """Items of a machine that is GOOD but for the changes: contents by names of files; None: not there."""
    with Place() as p:
        files = {**GOOD, **{k: v for k, v in changes.items() if k.startswith("/")}}
        for name, text in files.items():
            if text is not None:
                p.write("root" + name, text)
        config = p.write("kvd.conf", f"[daemon]\n{daemon}\n[space demo]\n[pool demo/kv]\n{pool}\n")
        r = kvctl("-s", p.path("none"), "check", "-c", config, "--root", p.path("root"), "-o", "json")
        return by_item(r)


def machine(what, item, level, text, fix, **changes):
    got = examine(**changes).get(item, [("absent", "", [])])
    good = any(l == level and re.search(text, t) and (fix in f if fix else not f) for l, t, f in got)
    check(what, good, f"{item}: {got}, wanted {level} /{text}/ {fix}")


HUGE = "/sys/kernel/mm/hugepages/hugepages-2048kB/"


def test_machine_kernel():
    machine("6.1 will do", "kernel", "ok", "6.1", None)
    r = examine(**{"/proc/sys/kernel/osrelease": "5.10.0-28-amd64\n"})["kernel"][0]
    check("5.10 will not", r[0] == "FAIL" and "6.1" in r[1] and "apt install" in r[2][0], r)
    equal("6.0 will not", examine(**{"/proc/sys/kernel/osrelease": "6.0.9\n"})["kernel"][0][0], "FAIL")
    equal("7.0 will", examine(**{"/proc/sys/kernel/osrelease": "7.0.1\n"})["kernel"][0][0], "ok")
    equal("unreadable", examine(**{"/proc/sys/kernel/osrelease": None})["kernel"][0][0], "skip")


def test_machine_hugepages():
    machine("enough", "hugepages", "ok", "need 6 pages of 2 MiB; 0 are theirs, 9 free", None)
    few = {HUGE + "free_hugepages": "5\n", HUGE + "resv_hugepages": "2\n"}  # 3 to be had, 6 needed, 10 there
    machine("too few", "hugepages", "warn", "need 6 pages.*there are 3", "sysctl vm.nr_hugepages=13", **few)
    machine("that are required", "hugepages", "FAIL", "need 6", "sysctl vm.nr_hugepages=13",
            daemon="hugepages = require", **few)
    machine("overcommit helps", "hugepages", "ok", "need 6", None, **few, **{HUGE + "nr_overcommit_hugepages": "3\n"})
    machine("surplus pages are no persistent ones", "hugepages", "warn", "need 6", "sysctl vm.nr_hugepages=11",
            **few, **{HUGE + "surplus_hugepages": "2\n"})
    machine("not wanted", "hugepages", "ok", "off", None, daemon="hugepages = off", **few)
    machine("a size that the kernel does not have", "hugepages", "warn", "no hugepages of 1048576 KiB",
            '"page_size = auto" in [daemon], or boot with hugepagesz=1048576K', daemon="page_size = 1G")
    gig = {k.replace("2048", "1048576"): "0\n" for k in GOOD if "2048kB" in k}
    machine("another size than the usual one", "hugepages", "warn", "need 2 pages of 1 GiB",
            "echo 2 > /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", daemon="page_size = 1G", **gig)
    poor = {"/proc/meminfo": GOOD["/proc/meminfo"].replace("9000000", "1024")}
    r = examine(**few, **poor)["hugepages"][0]
    check("no memory for more", any("smaller pools" in f and "1 MiB" in f for f in r[2]), r)


def test_machine_hugetlbfs():
    none = {"/proc/self/mountinfo": "".join(GOOD["/proc/self/mountinfo"].splitlines(True)[:2])}
    machine("mounted", "hugetlbfs", "ok", "/dev/hugepages", None)
    machine("not mounted", "hugetlbfs", "warn", "no mount", "systemctl start dev-hugepages.mount", **none)
    machine("without systemd", "hugetlbfs", "warn", "no mount",
            "mkdir -p /dev/hugepages && mount -t hugetlbfs -o pagesize=2048K none /dev/hugepages", **none,
            **{"/run/systemd/system/x": None})
    machine("a folder on it", "hugetlbfs", "ok", "/dev/hugepages/kvd", None, daemon="hugetlbfs = /dev/hugepages/kvd")
    machine("that is missing", "hugetlbfs", "warn", "does not exist", "install -d -m 0700 -o kvd -g kvd /dev/hugepages/q",
            daemon="hugetlbfs = /dev/hugepages/q")
    machine("that is elsewhere", "hugetlbfs", "warn", "not on a hugetlbfs", '"hugetlbfs = /dev/hugepages/kvd" in [daemon]',
            daemon="hugetlbfs = /srv/huge")
    machine("of another size", "hugetlbfs", "warn", "pages of 2048 KiB, not of 1048576", '"page_size = auto" in [daemon]',
            daemon="hugetlbfs = /dev/hugepages/kvd\npage_size = 1G")


def test_machine_memory():
    off = {"daemon": "hugepages = off"}
    machine("hugepages only", "memory", "ok", "hugepages only", None)
    machine("small pages", "memory", "ok", "9 MiB on small pages", None, **off)
    poor = {"/proc/meminfo": GOOD["/proc/meminfo"].replace("9000000", "1024")}
    machine("too little", "memory", "FAIL", "9 MiB.*this machine leaves 1 MiB", 'a smaller "size" (or "slots") in [pool demo/kv]',
            **off, **poor)
    machine("no overcommit", "memory", "FAIL", "overcommit_memory = 2 leaves 500 KiB", "sysctl vm.overcommit_memory=0", **off,
            **{"/proc/sys/vm/overcommit_memory": "2\n"})
    limit = "systemctl set-property kvd.service MemoryMax=infinity (docker: --memory)"
    machine("a control group", "memory", "warn", "control group.*leaves 3 MiB", limit, **off,
            **{"/sys/fs/cgroup/user.slice/a.scope/memory.max": "max\n",
               "/sys/fs/cgroup/user.slice/memory.max": f"{4 << 20}\n", "/sys/fs/cgroup/user.slice/memory.current": f"{1 << 20}\n"})
    machine("the tightest of several", "memory", "warn", "control group.*leaves 2 MiB", limit, **off,
            **{"/sys/fs/cgroup/user.slice/a.scope/memory.max": f"{2 << 20}\n", "/sys/fs/cgroup/user.slice/memory.max": f"{8 << 20}\n"})
    machine("of version 1", "memory", "warn", "control group.*leaves 1 MiB", limit, **off,
            **{"/proc/self/cgroup": "4:memory:/a/b\n0::/\n", "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{1 << 20}\n",
               "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n"})
    r = examine(**{"/sys/fs/cgroup/user.slice/hugetlb.2MB.max": f"{4 << 20}\n"})["memory"][0]
    check("hugepages of a control group", r[0] == "warn" and "need 6 hugepages" in r[1] and "allows 2" in r[1], r)
    machine("what does not fit on hugepages", "memory", "ok", "6 MiB on small pages", None,
            **{HUGE + "free_hugepages": "3\n"})


def test_machine_rest():
    machine("runtime_dir", "runtime_dir", "ok", "tmpfs", None)
    machine("on a disk", "runtime_dir", "warn", "ext4", '"runtime_dir = /run/kvd" in [daemon]',
            **{"/proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/vda rw\n"})
    mounts = {"/proc/self/mountinfo": "22 1 8:1 / / rw - ext4 x rw\n23 22 0:1 / /run/a\\040b rw - tmpfs t rw\n"}
    machine("a path with a blank", "runtime_dir", "ok", "tmpfs", None, daemon="runtime_dir = /run/a b", **mounts)
    machine("the beginning of a name is no folder", "runtime_dir", "warn", "ext4",
            '"runtime_dir = /run/kvd" in [daemon]', daemon="runtime_dir = /run/a bc", **mounts)
    machine("memlock", "memlock", "ok", "no limit", None)
    low = {"/proc/self/limits": "Max locked memory         65536                65536                bytes\n"}
    r = examine(**low)["memlock"][0]
    check("too low", r[0] == "warn" and "64 KiB" in r[1] and "9 MiB" in r[1] and "LimitMEMLOCK=infinity" in r[2][0], r)
    machine("root does not mind", "memlock", "ok", "CAP_IPC_LOCK", None, **low,
            **{"/proc/self/status": "CapEff:\t0000000000004000\n"})


def seccomp(number, argument, value, error):
    """A filter for the child: this system call, with this value of an argument (None: any), fails."""
    def install():
        ret, allow = 0x06, 0x7FFF0000
        code = [(0x20, 0, 0, 0), (0x15, 0, 1 if argument is None else 3, number)]
        if argument is not None:
            code += [(0x20, 0, 0, 16 + 8 * argument), (0x15, 0, 1, value)]
        code += [(ret, 0, 0, 0x00050000 | error), (ret, 0, 0, allow)]
        raw = b"".join(struct.pack("<HBBI", *c) for c in code)
        buffer = ctypes.create_string_buffer(raw)
        program = struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(buffer))
        libc = ctypes.CDLL(None, use_errno=True)
        holder = ctypes.create_string_buffer(program)
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, holder, 0, 0):
            os._exit(99)
    return install


def test_pidfd():
    getsockopt = {"x86_64": 55, "aarch64": 209}.get(platform.machine())
    if getsockopt is None:
        return skip("numbers of system calls are known for x86-64 and arm64 only")

    def both():
        seccomp(434, None, 0, 1)()
        seccomp(getsockopt, 2, 77, 92)()
    with Place() as p:
        def look(install):
            r = kvctl("-s", p.path("none"), "check", "-o", "json", preexec_fn=install)
            return by_item(r)["pidfd"][0]
        equal("works", look(None)[0], "ok")
        got = look(seccomp(getsockopt, 2, 77, 92))
        check("without SO_PEERPIDFD (before Linux 6.5)", got[0] == "ok" and "pidfd_open() works" in got[1], got)
        got = look(both)
        check("a container forbids it", got[0] == "FAIL" and "not permitted" in got[1] and "seccomp" in got[2][0], got)


def test_check_config():
    with Place() as p:
        p.daemon()
        r = p.kvctl("check", "-c", p.path("kvd.conf"), "-o", "json")
        equal("good", (by_item(r)["config"][0][0], r.rc), ("ok", OK), r.both)
        bad = p.write("bad.conf", "[daemon]\nhugepage = off\n")
        got = by_item(p.kvctl("check", "-c", bad, "-o", "json"))["config"][0]
        check("bad", got[0] == "FAIL" and "bad.conf:2" in got[1] and got[2] == [f"kvctl config check {bad}"], got)
        got = by_item(p.kvctl("check", "-c", p.path("none.conf"), "-o", "json"))["config"][0]
        check("missing", got[0] == "FAIL" and "none.conf" in got[1], got)


# ---- configuration and keys

def test_config_check():
    with Place() as p:
        r = kvctl("config", "check", p.config())
        check("good", r.rc == OK and "good: 1 space, 1 pool (16 MiB), 1 socket" in r.out, r.both)
        r = kvctl("config", "check", p.config(), "-o", "json")
        equal("as JSON", (r.json()["good"], r.json()["problems"], r.json()["pool_bytes"]), (True, [], 16 << 20))
        bad = p.write("bad.conf", "[daemon]\nhugepage = off\n[space a]\n[pool b/c]\nslot = 5\n")
        r = kvctl("config", "check", bad)
        check("every problem has its line", r.rc == FAILED and f"{bad}:2: error:" in r.out and f"{bad}:5: error:" in r.out,
              r.both)
        r = kvctl("config", "check", bad, "-o", "json")
        check("as JSON", not r.json()["good"] and {x.get("line") for x in r.json()["problems"]} >= {2, 5}, r.both)
        equal("missing", kvctl("config", "check", p.path("none")).rc, NOT_FOUND)


def test_keys_golden():
    with open(os.path.join(HERE, "..", "data", "chains.json")) as f:
        chains = json.load(f)
    tried = 0
    with Place() as p:
        for i, c in enumerate(chains):
            if c.get("mm") or c.get("mm_items") or c.get("items"):
                continue
            tokens = p.write(f"{i}.json", json.dumps(c["tokens"]))
            if c["scheme"] == "vllm":
                args = ["--scheme", "vllm-" + c["hash"].replace("_", "-"), "-b", str(c["block_tokens"])]
                args += ["--seed", c["seed"]] if c.get("seed") is not None else ["--first-parent", c["none_hash"]]
            else:
                args = ["--scheme", "sglang", "-b", str(c["page_tokens"])]
            for option, name in [("--salt", "cache_salt"), ("--lora", "lora"), ("--extra-key", "extra_key")]:
                args += [option, c[name]] if c.get(name) is not None else []
            r = kvctl("keys", *args, tokens, "-o", "json")
            if r.rc:
                check(f"chain {i}", False, r.both)
                continue
            equal(f"chain {i}", [k["key"] for k in r.json()["keys"]], c["keys"])
            tried += 1
    check("there were some", tried >= 5, tried)


def sglang(tokens, block):
    keys, parent = [], b""
    for i in range(0, len(tokens) // block * block, block):
        parent = hashlib.sha256(parent + struct.pack(f"<{block}I", *tokens[i:i + block])).digest()
        keys.append(parent.hex())
    return keys


def test_keys_formats():
    with Place() as p:
        text = "A text, and more of it: ä."
        tokens = list(text.encode())
        wanted = sglang(tokens, 4)
        args = ["keys", "--scheme", "sglang", "-b", "4", "-o", "json"]
        for name, content, more in [("t.txt", text, []), ("t.json", json.dumps(tokens), []),
                                    ("t.u32", struct.pack(f"<{len(tokens)}I", *tokens), []),
                                    ("t", "\n" + json.dumps(tokens) + "\n", ["-f", "json"])]:
            r = kvctl(*args, *more, p.write(name, content))
            equal(name, [k["key"] for k in r.json()["keys"]], wanted, r.both)
        r = kvctl(*args, "-", input=text)
        equal("standard input", [k["key"] for k in r.json()["keys"]], wanted)
        r = kvctl(*args, "-g", "3", p.path("t.txt"))
        equal("a group", r.json()["keys"][0]["name"], wanted[0] + ":3")
        r = kvctl("keys", "--scheme", "sglang", "-b", "4", p.path("t.txt"))
        check("table", r.rows()[1] == ["0", "0", "3", wanted[0]] and f"the last {len(tokens) % 4} of" in r.err, r.both)
        big = struct.pack("<8I", *([0xffffffff, 70000] * 4))
        r = kvctl(*args, p.write("big.u32", big))
        equal("large tokens", [k["key"] for k in r.json()["keys"]], sglang([0xffffffff, 70000] * 4, 4))


def test_keys_errors():
    with Place() as p:
        good = p.write("t.json", "[1, 2, 3, 4]")
        for name, content, wanted in [("a.json", "[1, -2]", "token 1 is -2"), ("b.json", "[1, 4294967296]", "token 1"),
                                      ("c.json", "[1.5]", "token 0 is 1.5"), ("d.json", '["1"]', "token 0"),
                                      ("e.json", "[1, 2", "ends too early"), ("f.json", "[1 2]", "at byte"),
                                      ("g.json", "{}", "array"), ("h.json", "[1] [2]", "array"), ("i.json", "", "JSON"),
                                      ("j.u32", b"12345", "5 bytes"), ("k.json", "[null]", "null")]:
            r = kvctl("keys", "--scheme", "sglang", p.write(name, content))
            check(f"{content!r}", r.rc == FAILED and wanted in r.err and not r.out, r.both)
        equal("no file", kvctl("keys", "--scheme", "sglang", p.path("none")).rc, NOT_FOUND)
        for args, wanted in [([], "--scheme"), (["--scheme", "md5"], "md5"), (["--scheme", "vllm-xxhash-cbor"], "--seed"),
                             (["--scheme", "sglang", "--seed", "0"], "first parent"),
                             (["--scheme", "sglang", "--lora", "x"], "--extra-key"),
                             (["--scheme", "vllm-sha256-cbor", "--extra-key", "x"], "sglang only"),
                             (["--scheme", "vllm-sha256-cbor", "--seed", "0", "--first-parent", "00" * 32], "not both"),
                             (["--scheme", "vllm-sha256-cbor", "--first-parent", "00"], "16 or 32"),
                             (["--scheme", "sglang", "-b", "0"], "65536"), (["--scheme", "sglang", "-f", "x"], "u32")]:
            r = kvctl("keys", *args, good)
            check(f"{args}", r.rc == USAGE and wanted in r.err, r.both)


# ---- terminals

def on_terminal(*args, env=None):
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.pop("NO_COLOR", None)
        os.environ.update(env or {})
        os.execv(KVCTL, [KVCTL, *args])
    out = b""
    with contextlib.suppress(OSError):
        while True:
            more = os.read(fd, 65536)
            if not more:
                break
            out += more
    os.waitpid(pid, 0)
    os.close(fd)
    return out.decode(errors="replace")


def test_color():
    with Place() as p:
        args = ["-s", p.path("none"), "check"]
        term = {"TERM": "xterm"}
        check("on a terminal", "\x1b[" in on_terminal(*args, env=term))
        check("not with NO_COLOR", "\x1b[" not in on_terminal(*args, env={**term, "NO_COLOR": "1"}))
        check("an empty NO_COLOR is none", "\x1b[" in on_terminal(*args, env={**term, "NO_COLOR": ""}))
        check("not with --no-color", "\x1b[" not in on_terminal("--no-color", *args, env=term))
        check("not in a pipe", "\x1b" not in kvctl(*args).out)


def test_full_disk():
    with Place() as p:
        p.daemon()
        with open("/dev/full", "w") as full:
            r = subprocess.run([KVCTL, "-s", p.socket, "status"], stdout=full, stderr=subprocess.PIPE, text=True)
        check("a lost output is a failure", r.returncode == FAILED and "cannot write" in r.stderr, r)


def main():
    global current
    if not KVD:
        sys.exit("usage: kvctl.py KVD KVCTL [NAME...]")
    for name, test in list(globals().items()):
        if not name.startswith("test_") or (sys.argv[3:] and not any(n in name for n in sys.argv[3:])):
            continue
        current = name[5:]
        try:
            test()
        except Exception as e:  # one broken test must not hide the others
            check("ran to its end", False, f"{type(e).__name__}: {e}")
    print(f"{passed} passed, {failed} failed" + (f" ({skipped} skipped)" if skipped else ""))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
