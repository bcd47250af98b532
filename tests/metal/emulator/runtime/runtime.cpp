// Runs a kernel: threadgroups one after the other, their threads as fibres, in an order that the host
// chooses.
//
// A barrier or an operation of a simdgroup is where threads wait for each other. Threads that wait in
// different calls although the language wants them in one are an error, never resolved in some way.
#include "fibres.hpp"
#include "state.hpp"
#if defined(MSL_CHECKED)
#include "checks.hpp"
#endif

// Threads that can go on; each is in it at most once.
static struct {
  int threads[MAX_THREADS];
  unsigned head, count;

  void push(int thread) { threads[(head + count++) % MAX_THREADS] = thread; }
  int pop() {
    const Order order = state.launch->order;
    if (order == REVERSED) return threads[(head + --count) % MAX_THREADS];
    int& first = threads[head % MAX_THREADS];
    if (order == RANDOM) {
      int& other = threads[(head + next_random() % count) % MAX_THREADS];
      const int swapped = first;
      first = other;
      other = swapped;
    }
    ++head;
    --count;
    return first;
  }
} ready;

long msl_defect = -1;

static const char* name_of(int operation) {
  static const char* const names[] = {"nothing",   "threadgroup_barrier", "simdgroup_barrier",
                                      "a shuffle", "a reduction",         "a prefix sum",
                                      "a ballot",  "a matrix multiplication"};
  return names[operation];
}

static void release(int thread) {
  fibres[thread].state = READY;
  ready.push(thread);
}

// Lets a simdgroup go on if all of its threads that have not returned wait for the same.
static void try_simdgroup(int simdgroup) {
  Simdgroup& group = simdgroups[simdgroup];
  if (group.num_live == 0 || group.num_waiting < group.num_live) return;
  const int begin = simdgroup * WIDTH;
  const int end = begin + WIDTH < state.num_threads ? begin + WIDTH : state.num_threads;
  int first = -1;
  unsigned active = 0;
  for (int thread = begin; thread < end; ++thread) {
    const Fibre& fibre = fibres[thread];
    if (fibre.state != WAITING) continue;
    if (first < 0) first = thread;
    const Fibre& other = fibres[first];
    if (fibre.operation != other.operation || fibre.line != other.line || fibre.size != other.size) {
      fail(
          "lanes of one simdgroup take different ways: thread %d waits in %s (line %d), thread %d in %s "
          "(line %d)",
          first, name_of(other.operation), other.line, thread, name_of(fibre.operation), fibre.line);
      return;
    }
    active |= 1u << (thread - begin);
  }
  const int operation = fibres[first].operation;
  if (operation == THREADGROUP_BARRIER) return;
  group.num_waiting = 0;
  if (operation != SIMDGROUP_BARRIER) {
    MslExchange& exchange = exchanges[simdgroup][fibres[first].parity];
    exchange.active = active;
    exchange.has_result = false;
  }
  for (int thread = begin; thread < end; ++thread)
    if (active >> (thread - begin) & 1) release(thread);
}

static void try_threadgroup() {
  if (state.num_live == 0 || state.num_at_barrier < state.num_live) return;
  if (state.num_live < state.num_threads) {
    fail("a threadgroup_barrier is reached by %d of %d threads; the others have returned", state.num_live,
         state.num_threads);
    return;
  }
  for (int thread = 1; thread < state.num_threads; ++thread) {
    if (fibres[thread].line == fibres[0].line) continue;
    fail("threads wait in different threadgroup_barriers: thread 0 in line %d, thread %d in line %d",
         fibres[0].line, thread, fibres[thread].line);
    return;
  }
  state.num_at_barrier = 0;
  for (int simdgroup = 0; simdgroup < state.num_simdgroups; ++simdgroup)
    simdgroups[simdgroup].num_waiting = 0;
  for (int thread = 0; thread < state.num_threads; ++thread) release(thread);
}

static void wait(int operation, int line, int size) {
  Fibre& fibre = fibres[state.current];
  fibre.state = WAITING;
  fibre.operation = operation;
  fibre.line = line;
  fibre.size = size;
  simdgroups[state.current / WIDTH].num_waiting++;
  state.num_at_barrier += operation == THREADGROUP_BARRIER;
  try_simdgroup(state.current / WIDTH);
  try_threadgroup();
  // Failures, and threads that wait forever, are reported outside.
  if (state.failed || ready.count == 0) {
    to_main();
  } else {
    to_fibre(ready.pop());
  }
}

// Threadgroup memory begins with the bits of a NaN. The gap after it may not be touched.
static Memory take_memory(uint64_t size, uint64_t alignment) {
  alignment = alignment < 16 ? 16 : alignment;
  const uint64_t begin = (state.arena_used + alignment - 1) / alignment * alignment;
  const uint64_t after = begin + size + GAP;
  if (size > MAX_THREADGROUP_MEMORY || after > ARENA_SIZE) return {nullptr, size};
  __asan_unpoison_memory_region(arena + begin, size);
  memset(arena + begin, 0xff, size);
  state.arena_used = after;
  state.declared_memory += size;
  return {arena + begin, size};
}

extern "C" {
void msl_threadgroup_barrier(int flags, int site, int line) {
  if (site == state.launch->left_out) return;
  wait(THREADGROUP_BARRIER, line, 0);
  Fibre& fibre = fibres[state.current];
  if (flags & BARRIER_THREADGROUP) {
    fibre.threadgroup_epoch.threadgroup++;
    fibre.threadgroup_epoch.simdgroup++;
  }
  if (flags & BARRIER_DEVICE) {
    fibre.device_epoch.threadgroup++;
    fibre.device_epoch.simdgroup++;
  }
}

void msl_simdgroup_barrier(int flags, int site, int line) {
  if (site == state.launch->left_out) return;
  wait(SIMDGROUP_BARRIER, line, 0);
  Fibre& fibre = fibres[state.current];
  if (flags & BARRIER_THREADGROUP) fibre.threadgroup_epoch.simdgroup++;
  if (flags & BARRIER_DEVICE) fibre.device_epoch.simdgroup++;
}

// Two exchanges take turns: a lane may give its next value while another still reads this one.
MslExchange* msl_exchange(const void* value, int size, int operation, int line) {
  Fibre& fibre = fibres[state.current];
  MslExchange* exchange = &exchanges[state.current / WIDTH][fibre.parity];
  memcpy(exchange->slots[state.current % WIDTH], value, size);
  wait(operation, line, size);
  fibre.parity ^= 1;
  return exchange;
}

int msl_lane() { return state.current % WIDTH; }

void msl_fail(int what, int line) {
  static const char* const messages[] = {"a simdgroup function reads a lane that has returned",
                                         "a simdgroup function reads a lane that does not exist",
                                         "a matrix multiplication without some of its lanes"};
  fail("%s (line %d, thread %d)", messages[what], line, state.current);
  give_up();
}

void* msl_threadgroup_variable(int site, unsigned long size, int alignment) {
  Memory* memory = site < MAX_VARIABLES ? &state.variables[site] : nullptr;
  if (memory && !memory->at) {
    *memory = take_memory(size, alignment);
#if defined(MSL_CHECKED)
    if (memory->at) add_threadgroup_memory(*memory, "threadgroup variable", site);
#endif
  }
  if (!memory || !memory->at || state.declared_memory > state.launch->max_memory) {
    fail("more than %lu bytes of threadgroup memory", state.launch->max_memory);
    give_up();
  }
  return memory->at;
}

void* msl_argument_pointer(int position) {
  const int index = state.position_index[position];
  return state.position_kind[position] == MSL_THREADGROUP ? state.argument_memory.at : state.buffers[index];
}

unsigned msl_argument_value(int position, int component) {
  const unsigned thread = state.current, c = component, n = state.num_threads;
  const unsigned in_threadgroup = c == 0 ? thread : 0, threads = c == 0 ? n : 1;
  switch (state.position_index[position]) {
    case MSL_THREAD_IN_GRID: return state.threadgroup[c] * threads + in_threadgroup;
    case MSL_THREAD_IN_THREADGROUP: return in_threadgroup;
    case MSL_THREADGROUP_IN_GRID: return state.threadgroup[c];
    case MSL_THREADGROUPS_PER_GRID: return state.launch->grid[c];
    case MSL_THREADS_PER_GRID: return state.launch->grid[c] * threads;
    case MSL_THREADS_PER_THREADGROUP: return threads;
    case MSL_THREAD_INDEX: return thread;
    case MSL_LANE: return thread % WIDTH;
    case MSL_SIMDGROUP: return thread / WIDTH;
    case MSL_SIMDGROUPS: return state.num_simdgroups;
    default: return WIDTH;
  }
}

// libgcc has it from version 13 on.
__attribute__((weak)) __bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint16_t rounded = is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  __bf16 result;
  memcpy(&result, &rounded, sizeof result);
  return result;
}
}

// The bindings have to match the kernel's parameters exactly.
static void bind(const Launch& launch) {
  uint64_t bound = 0, taken = 0;
  bool takes_memory = false;
  __asan_unpoison_memory_region(arguments, sizeof arguments);
  memcpy(arguments, launch.arguments, launch.arguments_len);
  __asan_poison_memory_region(arguments + launch.arguments_len, sizeof arguments - launch.arguments_len);
  if (launch.arguments_len > 0) {
    bound = 1;
    state.buffers[0] = arguments;
  }
#if defined(MSL_CHECKED)
  forget_regions();
  add_buffer({arguments, launch.arguments_len, 0, nullptr, READ}, 0);
#endif
  for (uint64_t i = 0; i < launch.num_bindings; ++i) {
    state.buffers[i + 1] = launch.bindings[i].base + launch.bindings[i].offset;
    bound |= 2ull << i;
#if defined(MSL_CHECKED)
    add_buffer(launch.bindings[i], int(i + 1));
#endif
  }
  int position = 0;
  for (const MslParameter* p = launch.kernel->parameters; p->kind >= 0; ++p, ++position) {
    if (position >= MAX_PARAMETERS) return fail("more than %d parameters", MAX_PARAMETERS);
    state.position_kind[position] = p->kind;
    state.position_index[position] = p->index;
    if (p->kind == MSL_BUFFER) taken |= 1ull << p->index;
    if (p->kind == MSL_THREADGROUP) takes_memory = true;
    if (p->kind == MSL_BUFFER && p->index == 0 && p->size != launch.arguments_len)
      return fail("the arguments have %lu bytes, the kernel's structure %lu", launch.arguments_len, p->size);
  }
  for (int index = 0; index < 31; ++index) {
    const bool is_bound = bound >> index & 1, is_taken = taken >> index & 1;
    if (is_bound && !is_taken) return fail("buffer(%d) is given, but the kernel has none", index);
    if (!is_bound && is_taken) return fail("buffer(%d) is not given", index);
  }
  if (takes_memory && launch.threadgroup_memory == 0) return fail("threadgroup(0) has no size");
  if (!takes_memory && launch.threadgroup_memory > 0)
    return fail("the kernel has no threadgroup(0) for %lu bytes", launch.threadgroup_memory);
}

// A constant that the host does not give has no value on a device; here it has a strange one.
static void set_constants(const Launch& launch) {
  for (const MslConstant* constant = msl_constants; constant->index >= 0; ++constant)
    memset(constant->address, constant->size == 1 ? 1 : 0xa5, constant->size);
  for (uint64_t i = 0; i < launch.num_constants; ++i) {
    const ConstantValue& value = launch.constants[i];
    const MslConstant* constant = msl_constants;
    while (constant->index >= 0 && uint32_t(constant->index) != value.index) ++constant;
    if (constant->index < 0) return fail("there is no function constant %u", value.index);
    memcpy(constant->address, &value.value, constant->size);
  }
}

static void run_threadgroup() {
  const Launch& launch = *state.launch;
  state.arena_used = GAP;
  state.declared_memory = 0;
  memset(state.variables, 0, sizeof state.variables);
  __asan_poison_memory_region(arena, ARENA_SIZE);
#if defined(MSL_CHECKED)
  forget_threadgroup_memory();
#endif
  if (launch.threadgroup_memory > 0) {
    state.argument_memory = take_memory(launch.threadgroup_memory, 16);
#if defined(MSL_CHECKED)
    add_threadgroup_memory(state.argument_memory, "threadgroup", 0);
#endif
  }
  ready.head = ready.count = 0;
  state.num_live = state.num_threads;
  state.num_at_barrier = 0;
  for (int simdgroup = 0; simdgroup < state.num_simdgroups; ++simdgroup) simdgroups[simdgroup] = {};
  for (int thread = 0; thread < state.num_threads; ++thread) {
    start(thread);
    simdgroups[thread / WIDTH].num_live++;
    ready.push(thread);
  }
  while (state.num_live > 0 && !state.failed) {
    if (ready.count == 0) {
      fail("threads wait for others that never come: %d of %d are at a threadgroup_barrier",
           state.num_at_barrier, state.num_live);
      return;
    }
    resume(ready.pop());
    // The last of those that took turns: it has returned, or there is an end to all.
    const int thread = state.current;
    if (fibres[thread].state == DONE) {
      state.num_live--;
      simdgroups[thread / WIDTH].num_live--;
      try_simdgroup(thread / WIDTH);
      try_threadgroup();
    }
  }
}

static uint64_t threadgroup_of(const Launch& launch, uint64_t step, uint64_t count) {
  static std::vector<uint32_t> shuffled;
  if (launch.order == FORWARD) return step;
  if (launch.order == REVERSED) return count - 1 - step;
  if (step == 0) {
    shuffled.resize(count);
    for (uint64_t i = 0; i < count; ++i) shuffled[i] = uint32_t(i);
    for (uint64_t i = count; i > 1; --i) {
      uint32_t& other = shuffled[next_random() % i];
      const uint32_t swapped = shuffled[i - 1];
      shuffled[i - 1] = other;
      other = swapped;
    }
  }
  return shuffled[step];
}

extern "C" {
// The size of the shadow of each byte that kernels write; 0 if accesses are not checked.
uint64_t msl_shadow_size() {
#if defined(MSL_CHECKED)
  return sizeof(Cell);
#else
  return 0;
#endif
}

// 0 if the kernel ran, 1 if there is a message. The host has checked the arguments: sizes and counts are
// within the limits.
int msl_launch(const Launch* launch) {
  state.launch = launch;
  state.failed = false;
  state.random = launch->seed * 0x9e3779b97f4a7c15ull + 88172645463325252ull;
  state.num_threads = int(launch->num_threads);
  state.num_simdgroups = state.num_threads / WIDTH;
  msl_defect = launch->defect;
  set_constants(*launch);
  if (!state.failed) bind(*launch);
  const uint64_t count = uint64_t(launch->grid[0]) * launch->grid[1] * launch->grid[2];
  for (uint64_t step = 0; step < count && !state.failed; ++step) {
    const uint64_t index = threadgroup_of(*launch, step, count);
    state.serial = launch->first_serial + uint32_t(index);
    state.threadgroup[0] = uint32_t(index % launch->grid[0]);
    state.threadgroup[1] = uint32_t(index / launch->grid[0] % launch->grid[1]);
    state.threadgroup[2] = uint32_t(index / launch->grid[0] / launch->grid[1]);
    run_threadgroup();
  }
  if (state.failed) forget_frames();
  return state.failed;
}
}
