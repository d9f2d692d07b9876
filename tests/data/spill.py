# SPDX-License-Identifier: Apache-2.0
# The golden bytes of tests/unit/test_spill_format.c, from docs/spill-format.md alone and with another
# implementation of XXH3 (python3-xxhash). Prints C.
import struct, xxhash
P = struct.pack
uuid = bytes(range(0xa0, 0xb0))
record_bytes, sector, piece = 128, 4096, 1 << 20
up = lambda v, unit: -(-v // unit) * unit
part, parts, size = 12288, 3, 10 * piece + 4095
n = max(n for n in range(1, 1000) if
        up((1 << 20) + 2 * up(n * record_bytes, sector), piece) + n * part * parts <= size)
user = (1 << 20) + up(n * record_bytes, sector)
data = up(user + up(n * record_bytes, sector), piece)
end = data + n * part * parts
s = b'kvdspill' + P('<II', 1, 7) + uuid
s += P('<QQQQQQQ', 0x0102030405060708, 1700000000, n, 1 << 20, user, data, end)
s += P('<QII', part, parts, record_bytes)
s += b'llama'.ljust(64, b'\0') + b'kv'.ljust(64, b'\0') + bytes(range(0x10, 0x20))
s = s.ljust(4088, b'\0')
s += P('<Q', xxhash.xxh3_64_intdigest(s))
def record(digest):
    r = bytes(range(32)) + bytes(range(0xff, 0xdf, -1)) + P('<II', 5, 6)
    r += P('<QQQQ', digest, 0x2122232425262728, 0x3132333435363738, 0x4142434445464748)
    r += P('<IIII', 9999, 7, 0x51525354, 0x61626364) + P('<HH', 1, 3)
    return r
head = record(0) + bytes(4) + uuid + b'abc'
digest = xxhash.xxh3_64_intdigest(head)
pieces = [i * 0x9e3779b97f4a7c15 % 2**64 for i in range(1, 131)]
for i in range(0, 130, 64):
    run = pieces[i:i + 64]
    digest = xxhash.xxh3_64_intdigest(P('<%dQ' % len(run), *run), seed=digest)
r = record(digest)
place = uuid + P('<I', 77)
r += P('<I', xxhash.xxh3_64_intdigest(r, seed=xxhash.xxh3_64_intdigest(place)) & 0xffffffff)
dump = lambda b: ''.join('    ' + ', '.join('0x%02x' % x for x in b[i:i+12]) + ',\n' for i in range(0, len(b), 12))
for name, b in (('golden_super', s[:248]), ('golden_super_check', s[4088:]), ('golden_record', r)):
    print('static const uint8_t %s[] = {\n%s};\n' % (name, dump(b)))
print('/* %d records, user table at %d, data at %d, end at %d */' % (n, user, data, end))
