// Checks every access to memory: bounds, declarations, races, and reads of unwritten bytes.
//
// Kernels are compiled with -fsanitize=thread, but the functions that it calls are these. The last writer and
// the last reader are kept for each byte (once for the four of a word as long as whole words are accessed, as they
// mostly are), so the answer is exact: two accesses are in order if they are of one
// thread, or of one threadgroup with a barrier between them that orders this kind of memory (of one
// simdgroup, any such barrier). The order in which threads ran does not matter.
#pragma once
#include <cstddef>

#include "fibres.hpp"

struct Access {
  // The threadgroup. A number of an earlier launch means that there was no access.
  uint32_t serial;
  uint32_t thread : 15, is_atomic : 1, is_write : 1;
  Epoch epoch;
  // From the begin of the object.
  uint32_t code;
};
struct Cell {
  Access write, reads[2];
  // Of the first byte of a word: since which launch, by its first threadgroup, each byte has a cell of its own. Before
  // that, and in later launches, this one is for all four.
  uint32_t split_since;
};
static const int WORD = 4;

struct Region {
  uintptr_t begin, end;
  bool is_device;
  const char* kind;
  int index;
  uint32_t access;
  // The cell of the byte at `base` is the first; none if nothing writes here.
  uintptr_t base;
  Cell* shadow;
};
static Region regions[MAX_PARAMETERS + MAX_VARIABLES];
static int num_regions, num_device_regions, last_region;

extern "C" {
extern char __ehdr_start __attribute__((visibility("hidden")));
extern char _end __attribute__((visibility("hidden")));
}

// A buffer that is bound twice is one region with the rights of both bindings.
static void add_buffer(const Binding& binding, int index) {
  const uintptr_t base = uintptr_t(binding.base), begin = base + binding.offset, end = base + binding.len;
  for (int i = 0; i < num_regions; ++i) {
    Region& region = regions[i];
    if (region.base != base) continue;
    if (begin < region.begin) region.begin = begin;
    region.access |= uint32_t(binding.access);
    if (binding.shadow) region.shadow = binding.shadow;
    return;
  }
  regions[num_regions++] = {begin, end,           true, "buffer", index, uint32_t(binding.access),
                            base,  binding.shadow};
  num_device_regions = num_regions;
}

static Cell threadgroup_shadow[ARENA_SIZE];

static void add_threadgroup_memory(const Memory& memory, const char* kind, int index) {
  const uintptr_t begin = uintptr_t(memory.at);
  Cell* shadow = threadgroup_shadow + (memory.at - arena);
  regions[num_regions++] = {begin, begin + memory.size, false, kind, index, READ | WRITE, begin, shadow};
}

static void forget_threadgroup_memory() {
  num_regions = num_device_regions;
  last_region = 0;
}
static void forget_regions() { num_regions = num_device_regions = last_region = 0; }

static void describe(char* text, size_t size, const Access& access) {
  snprintf(text, size, "%s by thread %u (simdgroup %u, lane %u) of threadgroup %u at @%x@",
           access.is_write ? "write" : "read", unsigned(access.thread), access.thread / WIDTH,
           access.thread % WIDTH, access.serial - state.launch->first_serial, access.code);
}

// The access does not happen: it might be anywhere.
[[noreturn]] static void report(const char* what, const Region* region, uintptr_t address, const Access& now,
                                const Access* earlier) {
  char location[96] = "", current[160], other[176] = "";
  if (region)
    snprintf(location, sizeof location, " on %s(%d), byte %zu", region->kind, region->index,
             size_t(address - region->base));
  describe(current, sizeof current, now);
  if (earlier) {
    memcpy(other, "; earlier ", 11);
    describe(other + 10, sizeof other - 10, *earlier);
  }
  fail("%s%s: %s%s", what, location, current, other);
  give_up();
}

static bool in_order(const Access& earlier, const Access& now, bool is_device) {
  if (earlier.serial != now.serial) {
    // Another threadgroup cannot see threadgroup memory: it only had the same address before.
    return !is_device || earlier.serial < state.launch->first_serial;
  }
  if (earlier.thread == now.thread || earlier.epoch.threadgroup < now.epoch.threadgroup) return true;
  return earlier.thread / WIDTH == now.thread / WIDTH && earlier.epoch.simdgroup < now.epoch.simdgroup;
}

static bool is_race(const Access& earlier, const Access& now, bool is_device) {
  return !(earlier.is_atomic && now.is_atomic) && !in_order(earlier, now, is_device);
}

static int distance(const Access& a, const Access& b) {
  if (a.serial != b.serial) return 2;
  return a.thread / WIDTH != b.thread / WIDTH;
}

// Two reads suffice to find every write that races with any: those farthest apart, where every thread that
// is not in order with some read is not in order with one of them.
static void remember_read(Cell& cell, const Access& now, bool is_device) {
  Access& first = cell.reads[0];
  Access& second = cell.reads[1];
  if (in_order(first, now, is_device)) {
    first = now;
  } else if (in_order(second, now, is_device)) {
    second = now;
  } else if (distance(first, now) > distance(first, second)) {
    second = now;
  }
}

static Region* region_of(uintptr_t address) {
  if (last_region < num_regions && address >= regions[last_region].begin &&
      address < regions[last_region].end)
    return &regions[last_region];
  for (int i = 0; i < num_regions; ++i) {
    if (address < regions[i].begin || address >= regions[i].end) continue;
    last_region = i;
    return &regions[i];
  }
  return nullptr;
}

// Most accesses outside all regions are to this one, so it is checked first.
static bool is_own_stack(uintptr_t address) { return address - uintptr_t(stack_of(state.current)) < STACK_SIZE; }

static bool is_private(uintptr_t address) {
  const bool in_object = address >= uintptr_t(&__ehdr_start) && address < uintptr_t(&_end);
  const bool in_arena = address >= uintptr_t(arena) && address < uintptr_t(arena) + ARENA_SIZE;
  const bool in_arguments =
      address >= uintptr_t(arguments) && address < uintptr_t(arguments) + sizeof arguments;
  return in_object && !in_arena && !in_arguments;
}

static void check_cell(Cell& cell, Region* region, uintptr_t address, const Access& now) {
  const bool is_device = region->is_device;
  if (is_race(cell.write, now, is_device)) report("race", region, address, now, &cell.write);
  if (now.is_write) {
    for (const Access& read : cell.reads)
      if (is_race(read, now, is_device)) report("race", region, address, now, &read);
    cell.write = now;
    return;
  }
  const bool is_written =
      is_device ? cell.write.serial >= state.launch->first_serial : cell.write.serial == state.serial;
  if (!is_written && !is_device) report("read of memory without value", region, address, now, nullptr);
  if (!is_written && !(region->access & READ))
    report("read of what is declared as written", region, address, now, nullptr);
  remember_read(cell, now, is_device);
}

static void split(Cell* word) {
  for (int i = 1; i < WORD; ++i) word[i] = word[0];
  word->split_since = state.launch->first_serial;
}

static void check(const volatile void* at, int size, bool is_write, bool is_atomic, void* code) {
  const uintptr_t address = uintptr_t(at);
  if (is_own_stack(address)) return;
  const Fibre& fibre = fibres[state.current];
  Region* region = region_of(address);
  if (!region && is_private(address)) return;
  Access now = {state.serial, unsigned(state.current),
                is_atomic,    is_write,
                {},           uint32_t(static_cast<char*>(code) - 1 - &__ehdr_start)};
  if (!region) report("access out of bounds", nullptr, address, now, nullptr);
  now.epoch = region->is_device ? fibre.device_epoch : fibre.threadgroup_epoch;
  if (address + size > region->end) report("access out of bounds", region, address, now, nullptr);
  if (is_write && !(region->access & WRITE))
    report("write to what is declared as read", region, address, now, nullptr);
  if (!region->shadow) return;
  for (uintptr_t next = address; next < address + size;) {
    const uintptr_t byte = next - region->base, word = byte / WORD * WORD;
    Cell* cells = region->shadow + word;
    const bool is_whole = byte == word && next + WORD <= address + size;
    const bool is_split = cells->split_since == state.launch->first_serial;
    if (!is_whole && !is_split) split(cells);
    check_cell(cells[byte - word], region, next, now);
    next += is_whole && !is_split ? WORD : 1;
  }
}

#define CODE __builtin_return_address(0)
#define CHECKED_SIZE(n)                                                       \
  void __tsan_read##n(void* a) { check(a, n, false, false, CODE); }           \
  void __tsan_write##n(void* a) { check(a, n, true, false, CODE); }           \
  void __tsan_unaligned_read##n(void* a) { check(a, n, false, false, CODE); } \
  void __tsan_unaligned_write##n(void* a) { check(a, n, true, false, CODE); } \
  void __tsan_read_write##n(void* a) {                                        \
    check(a, n, false, false, CODE);                                          \
    check(a, n, true, false, CODE);                                           \
  }                                                                           \
  void __tsan_unaligned_read_write##n(void* a) {                              \
    check(a, n, false, false, CODE);                                          \
    check(a, n, true, false, CODE);                                           \
  }
#define CHECKED_ATOMIC(n, T)                                                                      \
  T __tsan_atomic##n##_load(const volatile T* a, int) {                                           \
    check(a, n / 8, false, true, CODE);                                                           \
    return *a;                                                                                    \
  }                                                                                               \
  void __tsan_atomic##n##_store(volatile T* a, T value, int) {                                    \
    check(a, n / 8, true, true, CODE);                                                            \
    *a = value;                                                                                   \
  }                                                                                               \
  T __tsan_atomic##n##_exchange(volatile T* a, T value, int) {                                    \
    check(a, n / 8, true, true, CODE);                                                            \
    T old = *a;                                                                                   \
    *a = value;                                                                                   \
    return old;                                                                                   \
  }                                                                                               \
  T __tsan_atomic##n##_fetch_add(volatile T* a, T value, int) {                                   \
    check(a, n / 8, true, true, CODE);                                                            \
    T old = *a;                                                                                   \
    *a = T(old + value);                                                                          \
    return old;                                                                                   \
  }                                                                                               \
  T __tsan_atomic##n##_compare_exchange_val(volatile T* a, T expected, T value, int, int) {       \
    check(a, n / 8, true, true, CODE);                                                            \
    T old = *a;                                                                                   \
    if (old == expected) *a = value;                                                              \
    return old;                                                                                   \
  }                                                                                               \
  int __tsan_atomic##n##_compare_exchange_strong(volatile T* a, T* expected, T value, int, int) { \
    check(a, n / 8, true, true, CODE);                                                            \
    const bool same = *a == *expected;                                                            \
    if (same)                                                                                     \
      *a = value;                                                                                 \
    else                                                                                          \
      *expected = *a;                                                                             \
    return same;                                                                                  \
  }                                                                                               \
  int __tsan_atomic##n##_compare_exchange_weak(volatile T* a, T* expected, T value, int, int) {   \
    check(a, n / 8, true, true, CODE);                                                            \
    const bool same = *a == *expected;                                                            \
    if (same)                                                                                     \
      *a = value;                                                                                 \
    else                                                                                          \
      *expected = *a;                                                                             \
    return same;                                                                                  \
  }
extern "C" {
CHECKED_SIZE(1)
CHECKED_SIZE(2)
CHECKED_SIZE(4)
CHECKED_SIZE(8)
CHECKED_SIZE(16)
CHECKED_ATOMIC(8, uint8_t)
CHECKED_ATOMIC(16, uint16_t)
CHECKED_ATOMIC(32, uint32_t)
CHECKED_ATOMIC(64, uint64_t)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* a, unsigned long n) { check(a, int(n), false, false, CODE); }
void __tsan_write_range(void* a, unsigned long n) { check(a, int(n), true, false, CODE); }
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  check(from, int(n), false, false, CODE);
  check(to, int(n), true, false, CODE);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  check(from, int(n), false, false, CODE);
  check(to, int(n), true, false, CODE);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  check(to, int(n), true, false, CODE);
  return memset(to, value, n);
}
}
