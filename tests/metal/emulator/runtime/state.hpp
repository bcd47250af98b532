// A launch, and the state of its execution.
//
// One launch at a time runs in a loaded object; the host holds a lock. Nothing here is allocated during one.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../shim/abi.hpp"

static const int MAX_THREADS = 1024, WIDTH = 32, MAX_SIMDGROUPS = MAX_THREADS / WIDTH, MAX_PARAMETERS = 48;
static const int MAX_ARGUMENT_BYTES = 4096, MAX_THREADGROUP_MEMORY = 227 * 1024, MAX_VARIABLES = 32;
enum { BARRIER_DEVICE = 1, BARRIER_THREADGROUP = 2 };

// The host's arguments; `object.rs` has the same structures.
enum Order : int32_t { FORWARD, REVERSED, RANDOM };
enum { READ = 1, WRITE = 2 };
struct Cell;
struct Binding {
  char* base;
  uint64_t len, offset;
  Cell* shadow;
  uint64_t access;
};
struct ConstantValue {
  uint32_t index;
  uint32_t value;
};
struct Launch {
  const MslKernel* kernel;
  const char* arguments;
  uint64_t arguments_len;
  const Binding* bindings;
  uint64_t num_bindings;
  const ConstantValue* constants;
  uint64_t num_constants;
  uint64_t threadgroup_memory;
  // Bytes of it that the device has.
  uint64_t max_memory;
  uint32_t grid[3];
  uint32_t num_threads;
  // A number for each threadgroup, never used before.
  uint32_t first_serial;
  Order order;
  uint64_t seed;
  // The barrier that does nothing; -1 if all work.
  int64_t left_out;
  // The planted defect that shows; -1 if none does.
  int64_t defect;
  char* message;
  uint64_t message_len;
};

// Counts the barriers that a thread has passed, for each kind of memory: those of the threadgroup, and all.
struct Epoch {
  uint32_t threadgroup, simdgroup;
};

enum FibreState { READY, WAITING, DONE };
enum Operation { THREADGROUP_BARRIER = 1, SIMDGROUP_BARRIER = 2 };

struct Fibre {
  void* stack_pointer;
  void* fake_stack;
  FibreState state;
  int operation, line, size, parity;
  Epoch device_epoch, threadgroup_epoch;
};

struct Simdgroup {
  int num_live, num_waiting;
};

// Threadgroup memory: the parameter first, then variables, with gaps between them that no kernel may touch.
struct Memory {
  char* at;
  uint64_t size;
};

static struct {
  const Launch* launch;
  int current, num_threads, num_simdgroups, num_live, num_at_barrier;
  uint32_t serial, threadgroup[3];
  void* main_stack_pointer;
  void* main_fake_stack;
  const void* main_stack;
  size_t main_stack_size;
  bool failed, is_from_main;
  uint64_t random;
  void* buffers[MAX_PARAMETERS];
  int position_kind[MAX_PARAMETERS], position_index[MAX_PARAMETERS];
  Memory argument_memory, variables[MAX_VARIABLES];
  uint64_t arena_used, declared_memory;
} state;

// Threadgroup memory with gaps, and the arguments of the launch.
static const int GAP = 64, ARENA_SIZE = MAX_THREADGROUP_MEMORY + (MAX_VARIABLES + 2) * GAP;
alignas(256) static char arena[ARENA_SIZE];
alignas(256) static char arguments[MAX_ARGUMENT_BYTES];

static Fibre fibres[MAX_THREADS];
static Simdgroup simdgroups[MAX_SIMDGROUPS];
static MslExchange exchanges[MAX_SIMDGROUPS][2];

// The first failure counts: later ones may be its consequence.
__attribute__((format(printf, 1, 2))) static void fail(const char* format, ...) {
  if (state.failed) return;
  state.failed = true;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(state.launch->message, state.launch->message_len, format, arguments);
  va_end(arguments);
}

static uint32_t next_random() {
  state.random ^= state.random << 13;
  state.random ^= state.random >> 7;
  state.random ^= state.random << 17;
  return uint32_t(state.random >> 32);
}
