/* A box of a usual JPEG to 8-bit pixels, to the bits that libjpeg makes with its usual settings, and resized to those
   that torch makes.

   Usual: Huffman-coded, sequential, one scan, 8 bits; grey, or Y'CbCr whose colour is as fine as its brightness or
   half as fine. What lies below the box isn't decoded, what lies beside it isn't transformed, and restart intervals
   outside it are stepped over. Whatever is otherwise, damage above all, makes a function return 1: then another
   decoder has to say what is in the file. Nothing is written but `out` and what is allocated here.

   Sources: ITU-T T.81; the transform is that of Loeffler, Ligtenberg and Moschytz, 1989, in whole numbers. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FAST 10            /* bits that one look at a table resolves */
#define RESOLVED 32        /* an entry that has run, value and length of both */
#define MOST_SUM 5900      /* of a block's coefficients: below it nothing leaves 16 bits, where libraries differ */
#define MOST_MEAN 8191     /* the same for one that has its first alone */
#define SLACK 4096         /* more than a unit of blocks can read beyond its data */

typedef int32_t V __attribute__((vector_size(32)));
typedef int16_t Short8 __attribute__((vector_size(16)));
typedef uint8_t Byte8 __attribute__((vector_size(8)));
typedef uint8_t Byte16 __attribute__((vector_size(16)));
typedef uint32_t Word16 __attribute__((vector_size(64)));
typedef uint32_t Pixel4 __attribute__((vector_size(16)));
typedef int32_t Int16 __attribute__((vector_size(64)));
typedef float Float16 __attribute__((vector_size(64)));

typedef struct {
    int known, made, offset[17];
    uint32_t limit[17];     /* the first code, of 16 bits, beyond those of a length */
    uint8_t counts[16], values[256];
    int32_t fast[1 << FAST]; /* value << 16 | step, or symbol << 8 | RESOLVED | bits; 0: a longer code */
} Table;

typedef struct {
    int id, h, v, quantizer, dc, ac, last;
    int width, height, stride;
    uint8_t *plane; /* of the units of blocks that touch the box */
} Component;

typedef struct {
    int width, height, count, interval, jfif, adobe, oriented;
    Component parts[3];
    uint16_t quantizers[4][64];
    int has_quantizer[4];
    const uint8_t *scan;
    Table dc[4], ac[4]; /* last: they are kept */
} Frame;

typedef struct {
    const uint8_t *next, *end;
    uint64_t bits;
    int have;
} Reader;

static const uint8_t NATURAL[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,
    35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

static inline int smaller(int a, int b) { return a < b ? a : b; }
static inline int larger(int a, int b) { return a > b ? a : b; }
static inline int word(const uint8_t *p) { return p[0] << 8 | p[1]; }
static inline int extended(int bits, int size) { return bits < 1 << (size - 1) ? bits - (1 << size) + 1 : bits; }

/* A table of codes from its lengths and values, unless it is that of the file before; `is_ac`: symbols stand for a run
   and a size. */
static int read_table(Table *table, const uint8_t *counts, int total, int is_ac) {
    int code = 0, seen = 0;
    table->known = 1;
    if (table->made && !memcmp(table->counts, counts, 16) && !memcmp(table->values, counts + 16, total)) return 0;
    table->made = 0;
    memset(table->fast, 0, sizeof table->fast);
    memcpy(table->counts, counts, 16), memcpy(table->values, counts + 16, total);
    for (int length = 1; length <= 16; length++, code <<= 1) {
        table->offset[length] = seen - code;
        for (int n = 0; n < counts[length - 1]; n++, code++, seen++) {
            int symbol = table->values[seen], size = symbol & 15;
            if (code >= 1 << length || (!is_ac && symbol > 11)) return 1;
            if (length > FAST) continue;
            for (int rest = 0; rest < 1 << (FAST - length); rest++) {
                int spare = FAST - length - size, at = code << (FAST - length) | rest;
                table->fast[at] = symbol << 8 | length;
                if (is_ac && size && spare >= 0)
                    table->fast[at] = (int32_t)((uint32_t)extended(rest >> spare, size) << 16) | ((symbol >> 4) + 1) << 8 | RESOLVED | (length + size);
            }
        }
        table->limit[length] = (uint32_t)code << (16 - length);
    }
    table->made = 1;
    return 0;
}

static int read_tables(Frame *frame, const uint8_t *p, const uint8_t *end) {
    while (p < end) {
        int total = 0, place = p[0] & 15, is_ac = p[0] >> 4;
        if (end - p < 17 || place > 3 || is_ac > 1) return 1;
        for (int n = 1; n <= 16; n++) total += p[n];
        if (total > 256 || end - p < 17 + total) return 1;
        if (read_table(is_ac ? &frame->ac[place] : &frame->dc[place], p + 1, total, is_ac)) return 1;
        p += 17 + total;
    }
    return 0;
}

static int read_quantizers(Frame *frame, const uint8_t *p, const uint8_t *end) {
    for (; p < end; p += 65) {
        if (end - p < 65 || p[0] > 3) return 1;
        for (int n = 0; n < 64; n++) frame->quantizers[p[0]][n] = p[1 + n];
        frame->has_quantizer[p[0]] = 1;
    }
    return 0;
}

static int read_frame(Frame *frame, const uint8_t *p, int length) {
    if (frame->count || length < 6 || p[0] != 8) return 1;
    frame->height = word(p + 1), frame->width = word(p + 3), frame->count = p[5];
    if (!frame->height || !frame->width || (frame->count != 1 && frame->count != 3) || length != 6 + 3 * frame->count) return 1;
    for (int n = 0; n < frame->count; n++) {
        const uint8_t *own = p + 6 + 3 * n;
        frame->parts[n] = (Component){.id = own[0], .h = own[1] >> 4, .v = own[1] & 15, .quantizer = own[2]};
        Component *part = &frame->parts[n];
        if (own[2] > 3 || !part->h || part->h > 4 || !part->v || part->v > 4) return 1;
    }
    Component *part = frame->parts;
    if (frame->count == 1) {
        part->h = part->v = 1;
        return 0;
    }
    int fine = part[0].h == 1 && part[0].v == 1, half = part[0].h == 2 && part[0].v <= 2 && part[0].v && frame->width > 4;
    return !(fine || half) || part[1].h != 1 || part[1].v != 1 || part[2].h != 1 || part[2].v != 1;
}

static int read_scan(Frame *frame, const uint8_t *p, int length) {
    if (!frame->count || length != 4 + 2 * frame->count || p[0] != frame->count) return 1;
    for (int n = 0; n < frame->count; n++) {
        Component *part = &frame->parts[n];
        part->dc = p[2 + 2 * n] >> 4, part->ac = p[2 + 2 * n] & 15;
        if (p[1 + 2 * n] != part->id || part->dc > 3 || part->ac > 3 || !frame->has_quantizer[part->quantizer]) return 1;
        if (!frame->dc[part->dc].known || !frame->ac[part->ac].known) return 1;
        if (frame->count == 3 && !frame->jfif && part->id != n + 1) return 1;
    }
    p += length - 3;
    return p[0] != 0 || p[1] != 63 || p[2] != 0;
}

static int read_header(Frame *frame, const uint8_t *data, size_t size) {
    const uint8_t *p = data + 2, *end = data + size;
    if (size < 4 || data[0] != 0xff || data[1] != 0xd8) return 1;
    while (end - p >= 4) {
        int kind = p[1], length = word(p + 2) - 2, failed = 0;
        const uint8_t *own = p + 4;
        if (p[0] != 0xff || length < 0 || end - own < length) return 1;
        if (kind == 0xc0 || kind == 0xc1) failed = read_frame(frame, own, length);
        else if (kind == 0xc4) failed = read_tables(frame, own, own + length);
        else if (kind == 0xdb) failed = read_quantizers(frame, own, own + length);
        else if (kind == 0xdd) failed = length != 2, frame->interval = failed ? 0 : word(own);
        else if (kind == 0xe0) frame->jfif |= length >= 14 && !memcmp(own, "JFIF", 5);
        else if (kind == 0xe1) frame->oriented |= length >= 4 && !memcmp(own, "Exif", 4);
        else if (kind == 0xee) frame->adobe |= length >= 12 && !memcmp(own, "Adobe", 5);
        else if (kind == 0xda) {
            frame->scan = own + length;
            return read_scan(frame, own, length) || (frame->adobe && !frame->jfif);
        } else if ((kind & 0xf0) != 0xe0 && kind != 0xfe) return 1;
        if (failed) return 1;
        p = own + length;
    }
    return 1;
}

/* What a file's header says, until the thread asks for the next; NULL where it isn't a usual one. */
static Frame *parse(const uint8_t *data, size_t size) {
    static _Thread_local Frame frame;
    memset(&frame, 0, offsetof(Frame, dc));
    for (int n = 0; n < 4; n++) frame.dc[n].known = frame.ac[n].known = 0;
    return read_header(&frame, data, size) ? NULL : &frame;
}

static inline void refill(Reader *r) {
    uint64_t more;
    memcpy(&more, r->next, 8);
    r->bits |= __builtin_bswap64(more) >> r->have;
    r->next += (63 - r->have) >> 3;
    r->have |= 56;
}

static inline void drop(Reader *r, int count) { r->bits <<= count, r->have -= count; }

static inline int take(Reader *r, int count) {
    int found = (int)(r->bits >> (64 - count));
    drop(r, count);
    return found;
}

/* The symbol of a code that is longer than what one look resolves, or -1. */
static __attribute__((noinline)) int long_symbol(uint64_t bits, const Table *table) {
    uint32_t code = (uint32_t)(bits >> 48);
    for (int length = FAST + 1; length <= 16; length++)
        if (code < table->limit[length])
            return table->values[(table->offset[length] + (int)(code >> (16 - length))) & 255] << 8 | length;
    return -1;
}

/* A block's coefficients, in their natural order; returns the sum of their sizes, -1 where they can't be told.
   `only_mean` becomes 1 where there is none but the first. Without `block` it is only stepped over. */
static inline __attribute__((always_inline)) int read_block(Reader *given, Component *part, const Frame *frame, int16_t *block, int *only_mean) {
    const uint16_t *steps = frame->quantizers[part->quantizer];
    const Table *first = &frame->dc[part->dc], *table = &frame->ac[part->ac];
    Reader r = *given;
    refill(&r);
    int entry = first->fast[r.bits >> (64 - FAST)];
    if (!entry && (entry = long_symbol(r.bits, first)) < 0) return -1;
    drop(&r, entry & 31);
    int size = entry >> 8;
    if (size) part->last += extended(take(&r, size), size);
    int value = part->last * steps[0], sum = abs(value), k = 0;
    if (part->last > 32767 || part->last < -32768 || sum > 32767) return -1;
    if (block) memset(block, 0, 64 * sizeof *block), block[0] = (int16_t)value;
    for (;;) {
        if (r.have < 32) refill(&r);
        entry = table->fast[r.bits >> (64 - FAST)];
        if (entry & RESOLVED) {
            k += entry >> 8 & 255;
            drop(&r, entry & 31);
            value = entry >> 16;
        } else {
            if (!entry && (entry = long_symbol(r.bits, table)) < 0) return -1;
            drop(&r, entry & 31);
            size = entry >> 8 & 15;
            if (!size) {
                if (entry >> 12 != 15) break;
                k += 16;
                if (k >= 63) break;
                continue;
            }
            k += 1 + (entry >> 12);
            value = extended(take(&r, size), size);
        }
        if (k > 63) return -1;
        if (block) {
            value *= steps[k];
            sum += abs(value);
            block[NATURAL[k]] = (int16_t)value;
        }
        if (k == 63) break;
    }
    *only_mean = !k;
    *given = r;
    return sum > 32767 ? -1 : sum;
}

static inline void transpose(V r[8]) {
    V a[8], b[8];
    for (int n = 0; n < 4; n++) {
        a[2 * n] = __builtin_shufflevector(r[2 * n], r[2 * n + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        a[2 * n + 1] = __builtin_shufflevector(r[2 * n], r[2 * n + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int n = 0; n < 8; n += 4)
        for (int m = n; m < n + 2; m++) {
            b[m] = __builtin_shufflevector(a[m], a[m + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[m + 2] = __builtin_shufflevector(a[m], a[m + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int n = 0; n < 4; n++) {
        r[n] = __builtin_shufflevector(b[n], b[n + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        r[n + 4] = __builtin_shufflevector(b[n], b[n + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* One dimension of the transform, for eight rows or columns at once; results lose `shift` bits. */
static inline void transform(V r[8], int shift) {
    V sum = (r[2] + r[6]) * 4433, half = (V){} + (1 << (shift - 1));
    V low = sum - r[6] * 15137, high = sum + r[2] * 6270;
    V plus = ((r[0] + r[4]) << 13) + half, minus = ((r[0] - r[4]) << 13) + half;
    V even[4] = {plus + high, minus + low, minus - low, plus - high};
    V a = r[7] + r[3], b = r[5] + r[1], both = (a + b) * 9633;
    V outer = (r[7] + r[1]) * 7373, inner = (r[5] + r[3]) * 20995;
    a = both - a * 16069, b = both - b * 3196;
    V odd[4] = {r[1] * 12299 - outer + b, r[3] * 25172 - inner + a, r[5] * 16819 - inner + b, r[7] * 2446 - outer + a};
    for (int n = 0; n < 4; n++) {
        r[n] = (even[n] + odd[n]) >> shift;
        r[7 - n] = (even[n] - odd[n]) >> shift;
    }
}

static inline int too_large(const V r[8]) {
    V sum = {};
    for (int n = 0; n < 8; n++) sum += (r[n] ^ (r[n] >> 31)) - (r[n] >> 31);
    V over = sum > 32767;
    int any = 0;
    for (int n = 0; n < 8; n++) any |= over[n];
    return any;
}

/* Pixels of a block of which `sum` is the sum of coefficients' sizes. */
static inline int draw_block(const int16_t *block, int sum, int only_mean, uint8_t *out, int stride) {
    if (only_mean) {
        if (sum > MOST_MEAN) return 1;
        int level = (block[0] * 4 + 16) >> 5;
        for (int n = 0; n < 8; n++) memset(out + n * stride, smaller(255, larger(0, level + 128)), 8);
        return 0;
    }
    V r[8];
    for (int n = 0; n < 8; n++) {
        Short8 row;
        memcpy(&row, block + 8 * n, sizeof row);
        r[n] = __builtin_convertvector(row, V);
    }
    if (sum > MOST_SUM && too_large(r)) return 1;
    transform(r, 11);
    transpose(r);
    if (sum > MOST_SUM && too_large(r)) return 1;
    transform(r, 18);
    transpose(r);
    for (int n = 0; n < 8; n++) {
        V level = r[n] + 128;
        level &= ~(level >> 31);
        V over = level > 255;
        level = (level & ~over) | (over & 255);
        Byte8 row = __builtin_convertvector(level, Byte8);
        memcpy(out + n * stride, &row, sizeof row);
    }
    return 0;
}

/* Copies a scan without its stuffed zeros; `starts` are where restart intervals begin, and the end. */
static int unpack(const Frame *frame, const uint8_t *end, uint8_t *to, uint8_t **starts, int intervals) {
    const uint8_t *from = frame->scan;
    int seen = 0;
    for (starts[0] = to;;) {
        const uint8_t *found = memchr(from, 0xff, end - from);
        if (!found || end - found < 2) return 1;
        memcpy(to, from, found - from);
        to += found - from;
        from = found + 2;
        if (found[1] == 0) *to++ = 0xff;
        else if (found[1] == 0xd9) break;
        else if (found[1] != 0xd0 + (seen & 7) || ++seen >= intervals) return 1;
        else starts[seen] = to;
    }
    memset(to, 0, SLACK);
    starts[intervals] = to;
    return seen != intervals - 1;
}

typedef struct {
    int left, top, right, bottom;
} Box;

/* Decodes the units of blocks in `units`; the picture is `across` units wide. */
static int read_units(Frame *frame, Box units, int across, int interval, uint8_t **starts, int intervals) {
    int last = (units.bottom - 1) * across + units.right;
    _Alignas(32) int16_t block[64];
    for (int n = 0; n < intervals; n++) {
        int from = n * interval, to = smaller(from + interval, last), row = from / across;
        if (from >= last) break;
        if ((to - 1) / across < units.top) continue;
        if ((to - 1) / across == row && (from % across >= units.right || (to - 1) % across < units.left)) continue;
        Reader reader = {starts[n], starts[n + 1], 0, 0};
        for (int k = 0; k < frame->count; k++) frame->parts[k].last = 0;
        for (int unit = from, column = from % across; unit < to; unit++, column++) {
            if (column == across) column = 0, row++;
            int drawn = row >= units.top && column >= units.left && column < units.right;
            for (int k = 0; k < frame->count; k++) {
                Component *part = &frame->parts[k];
                for (int inner = 0; inner < part->h * part->v; inner++) {
                    int only_mean, sum;
                    if (!drawn) {
                        if (read_block(&reader, part, frame, NULL, &only_mean) < 0) return 1;
                        continue;
                    }
                    if ((sum = read_block(&reader, part, frame, block, &only_mean)) < 0) return 1;
                    int y = (row - units.top) * part->v + inner / part->h, x = (column - units.left) * part->h + inner % part->h;
                    if (draw_block(block, sum, only_mean, part->plane + (size_t)y * 8 * part->stride + 8 * x, part->stride)) return 1;
                }
            }
            if ((reader.next - reader.end) * 8 > reader.have) return 1;
        }
    }
    return 0;
}

/* A row of colour that is half as fine, made as fine as brightness. `from` is the row itself and `beside` the nearer of
   its neighbours where rows are half as fine too, else NULL; `origin` is where the plane begins in the picture. */
static void make_finer(const uint8_t *from, const uint8_t *beside, const Component *part, int origin, int left, int right, uint16_t *restrict out, uint16_t *restrict sums) {
    int first = larger(0, left / 2 - 1), end = smaller(part->width, (right - 1) / 2 + 2), count = (right - 1) / 2 + 1 - left / 2;
    int low = beside ? 8 : 4, high = beside ? 7 : 8;
    const uint8_t *restrict own = from + (first - origin), *restrict other = (beside ? beside : from) + (first - origin);
    for (int x = 0; x < end - first; x++) sums[x + 1] = (uint16_t)(3 * own[x] + other[x]);
    sums[0] = sums[1], sums[end - first + 1] = sums[end - first];
    const uint16_t *at = sums + 1 + (left / 2 - first);
    for (int x = 0; x < count; x++) out[x] = (uint16_t)((3 * at[x] + at[x - 1] + low) >> 4 | (3 * at[x] + at[x + 1] + high) >> 4 << 8);
}

/* Pixels are red, green, blue and nothing, from the lowest byte on. */
static void make_rgb(const uint8_t *restrict y, const uint8_t *restrict cb, const uint8_t *restrict cr, int count, uint32_t *restrict out) {
    for (int x = 0; x < count; x++) {
        int blue = cb[x] - 128, red = cr[x] - 128;
        int first = smaller(255, larger(0, y[x] + ((91881 * red + 32768) >> 16)));
        int second = smaller(255, larger(0, y[x] + ((-22554 * blue - 46802 * red + 32768) >> 16)));
        out[x] = (uint32_t)(first | second << 8 | smaller(255, larger(0, y[x] + ((116130 * blue + 32768) >> 16))) << 16);
    }
}

static void write_pixels(const Frame *frame, Box box, Box units, uint8_t *scratch, uint32_t *out) {
    const Component *y = &frame->parts[0];
    int wide = box.right - box.left, origin = units.left * 8, taken = (wide + 3) & ~1;
    for (int row = box.top; row < box.bottom; row++, out += wide) {
        const uint8_t *own = y->plane + (size_t)(row - units.top * 8 * y->v) * y->stride + (box.left - units.left * 8 * y->h), *colour[2];
        if (frame->count == 1) {
            for (int x = 0; x < wide; x++) out[x] = own[x] * 0x10101u;
            continue;
        }
        for (int k = 0; k < 2; k++) {
            const Component *part = &frame->parts[k + 1];
            int at = row / y->v, beside = row & 1 ? smaller(at + 1, part->height - 1) : larger(at - 1, 0);
            const uint8_t *plane = part->plane - (size_t)units.top * 8 * part->stride;
            const uint8_t *line = plane + (size_t)at * part->stride;
            const uint8_t *other = y->v == 1 ? NULL : plane + (size_t)beside * part->stride;
            colour[k] = line + box.left - origin;
            if (y->h == 1) continue;
            uint8_t *finer = scratch + k * taken;
            make_finer(line, other, part, origin, box.left, box.right, (uint16_t *)finer, (uint16_t *)(scratch + 2 * taken));
            colour[k] = finer + (box.left & 1);
        }
        make_rgb(own, colour[0], colour[1], wide, out);
    }
}

static int decode(Frame *frame, const uint8_t *end, Box box, uint32_t *out) {
    Component *part = frame->parts;
    int wide = 8 * part[0].h, high = 8 * part[0].v, spare = part[0].h > 1 ? 2 : 0;
    int across = (frame->width + wide - 1) / wide, down = (frame->height + high - 1) / high;
    int interval = frame->interval ? frame->interval : across * down;
    int intervals = (across * down + interval - 1) / interval, failed = 1;
    Box units = {larger(0, box.left - spare) / wide, larger(0, box.top - spare) / high,
                 smaller(across, (box.right + spare + wide - 1) / wide), smaller(down, (box.bottom + spare + high - 1) / high)};
    size_t area = (size_t)(units.right - units.left) * (units.bottom - units.top) * 64, planes = area * (part[0].h * part[0].v + frame->count - 1);
    uint8_t *scan = malloc((size_t)(end - frame->scan) + SLACK), *plane = malloc(planes), *scratch = malloc(8 * (size_t)(box.right - box.left) + 64);
    uint8_t **starts = malloc((intervals + 1) * sizeof *starts);
    if (scan && plane && scratch && starts && !unpack(frame, end, scan, starts, intervals)) {
        uint8_t *at = plane;
        for (int k = 0; k < frame->count; k++) {
            part[k].plane = at, part[k].stride = (units.right - units.left) * 8 * part[k].h;
            part[k].width = (frame->width * part[k].h + part[0].h - 1) / part[0].h;
            part[k].height = (frame->height * part[k].v + part[0].v - 1) / part[0].v;
            at += area * part[k].h * part[k].v;
        }
        failed = read_units(frame, units, across, interval, starts, intervals);
        if (!failed) write_pixels(frame, box, units, scratch, out);
    }
    free(scan), free(plane), free(scratch), free(starts);
    return failed;
}

/* How one dimension is resized: value n is made of those from first[n] on, each times its weight, whole numbers of which
   `one` is 1. */
typedef struct {
    int count;
    float one;
    const int32_t *first;
    const float *weights;
} Taps;

static inline void turn(Pixel4 p[4]) {
    Pixel4 a = __builtin_shufflevector(p[0], p[1], 0, 4, 1, 5), b = __builtin_shufflevector(p[2], p[3], 0, 4, 1, 5);
    Pixel4 c = __builtin_shufflevector(p[0], p[1], 2, 6, 3, 7), d = __builtin_shufflevector(p[2], p[3], 2, 6, 3, 7);
    p[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5), p[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    p[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5), p[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

/* Sums stay below 2**24, so that they are exact. */
static inline Word16 rounded(Float16 sum, float one) {
    return __builtin_convertvector((sum + one / 2) * (1 / one), Word16);
}

/* Makes rows of `wide` pixels as long as `taps` say, four rows at a time; `group` and `line` have room for them. */
static inline __attribute__((always_inline)) void resize_rows(const uint32_t *from, int wide, int rows, const Taps *taps, int count, int wanted, int mirrored, Pixel4 *group, Float16 *line, uint32_t *to) {
    int stride = (wanted + 15) & ~15;
    for (int row = 0; row < rows; row += 4, to += 4 * stride) {
        for (int x = 0; x < wide; x += 4) {
            for (int n = 0; n < 4; n++) memcpy(&group[x + n], from + (size_t)smaller(row + n, rows - 1) * wide + x, sizeof *group);
            turn(group + x);
        }
        for (int n = 0; n < 16 * wide; n++) ((float *)line)[n] = ((uint8_t *)group)[n];
        for (int x = 0; x < wanted; x += 4) {
            Pixel4 made[4];
            for (int n = 0; n < 4; n++) {
                int at = larger(0, mirrored ? wanted - 1 - x - n : smaller(x + n, wanted - 1));
                Float16 sum = {};
                for (int k = 0; k < count; k++) sum += taps->weights[at * count + k] * line[taps->first[at] + k];
                made[n] = (Pixel4)__builtin_convertvector(rounded(sum, taps->one), Byte16);
            }
            turn(made);
            for (int n = 0; n < 4; n++) memcpy(to + n * stride + x, &made[n], sizeof *made);
        }
    }
}

/* Makes of rows as many as are wanted, as planes. */
static inline __attribute__((always_inline)) void resize_columns(const uint32_t *from, const Taps *taps, int count, int channels, int wide, int high, uint8_t *out) {
    int stride = (wide + 15) & ~15;
    for (int y = 0; y < high; y++) {
        for (int x = 0; x < wide; x += 16) {
            Float16 sums[3] = {};
            for (int k = 0; k < count; k++) {
                Word16 pixels;
                memcpy(&pixels, from + (size_t)(taps->first[y] + k) * stride + x, sizeof pixels);
                for (int n = 0; n < 3; n++) sums[n] += taps->weights[y * count + k] * __builtin_convertvector((Int16)(pixels >> 8 * n & 255), Float16);
            }
            for (int n = 0; n < channels; n++) {
                Byte16 made = __builtin_convertvector(rounded(sums[n], taps->one), Byte16);
                uint8_t *to = out + ((size_t)n * high + y) * wide + x;
                if (wide - x >= 16) memcpy(to, &made, 16);
                else memcpy(to, &made, wide - x);
            }
        }
    }
}

/* Loops of a few rounds, whose number is known, take half the time. */
#define BY_COUNT(taps, call) do { if ((taps)->count == 2) { enum { count = 2 }; call; } else if ((taps)->count == 3) { enum { count = 3 }; call; } else { int count = (taps)->count; call; } } while (0)

static int resize(const uint32_t *pixels, int wide, int high, const Taps *across, const Taps *down, int channels, int new_wide, int new_high, int mirrored, uint8_t *out) {
    size_t room = (size_t)wide + 3 + across->count, between_rows = ((high + 3) & ~3) + down->count;
    Float16 *line = aligned_alloc(sizeof *line, room * sizeof *line);
    Pixel4 *group = aligned_alloc(sizeof *group, room * sizeof *group);
    uint32_t *between = calloc(between_rows * ((new_wide + 15) & ~15), sizeof *between);
    int failed = !line || !group || !between;
    if (!failed) {
        memset(line, 0, room * sizeof *line);
        BY_COUNT(across, resize_rows(pixels, wide, high, across, count, new_wide, mirrored, group, line, between));
        BY_COUNT(down, resize_columns(between, down, count, channels, new_wide, new_high, out));
    }
    free(line), free(group), free(between);
    return failed;
}

/* Width, height, channels, and whether a camera's data may ask for the picture to be turned. */
int jpeg_look(const uint8_t *data, size_t size, int32_t found[4]) {
    Frame *frame = parse(data, size);
    if (frame) found[0] = frame->width, found[1] = frame->height, found[2] = frame->count, found[3] = frame->oriented;
    return !frame;
}

/* Fills out[channels][high][wide] with a box, resized; grey is repeated, and colour isn't made grey. */
int jpeg_box(const uint8_t *data, size_t size, int left, int top, int right, int bottom, const Taps *across, const Taps *down, int channels, int wide, int high, int mirrored, uint8_t *out) {
    Frame *frame = parse(data, size);
    if (!frame || channels < frame->count || channels > 3) return 1;
    if (left < 0 || top < 0 || left >= right || top >= bottom || right > frame->width || bottom > frame->height) return 1;
    uint32_t *pixels = malloc(((size_t)(right - left) * (bottom - top) + 4) * sizeof *pixels);
    int failed = !pixels || decode(frame, data + size, (Box){left, top, right, bottom}, pixels);
    if (!failed) failed = resize(pixels, right - left, bottom - top, across, down, channels, wide, high, mirrored, out);
    free(pixels);
    return failed;
}
