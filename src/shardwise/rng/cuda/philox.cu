// Elements of a random fill, each computed from its index in the global tensor, as torch's kernels compute it.
//
// torch draws with Philox4x32-10. Thread t of T processes the elements t, t + T, t + 2T, ..., and uses one call of Philox
// for VALUES of them. So the index of an element determines its thread, its call and its word among the four.
//
// Compile-time constants: SCALAR, type of the result; REAL, type of the computation; DISTRIBUTION, a function below;
// THREADS, T of the device; VALUES, elements of one call; VECTOR, consecutive elements that a thread processes together
// (1 except for dropout); DIMS, of the block; RUNS, whether a dim has several runs; INDEX, integer type for elements of
// the block; SHARED, the dim along which elements share a call, or -1.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct half {
  unsigned short bits;
  __device__ explicit half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  __device__ operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};

struct bfloat16 {
  unsigned short bits;
  __device__ explicit bfloat16(float value) {
    u32 word = __float_as_uint(value);
    bits = value != value ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;  // to the nearest, ties to even
  }
  __device__ operator float() const { return __uint_as_float((u32)bits << 16); }
};

typedef SCALAR scalar;
typedef REAL real;

struct Fill {
  scalar* out;
  u64 seed, counter;
  u64 start;           // the global index at which torch's kernel starts
  i64 first, last;     // elements [first, last) of the block are filled
  i64 base;            // the first element, or chunk of elements, of the threads
  u64 spread;          // distance between the elements of a thread
  u64 slab, inner;     // elements of the block at one index of the dims before SHARED; at one index of SHARED
  u64 chunks, groups;  // chunks in a slab; groups in a chunk, which one thread processes
  double a, b;         // arguments of a real distribution
  u64 range;           // of an integer distribution; 0 is 2^64
  i64 low;
  const i64* runs;
};

struct Dim {
  u64 size, stride, start, runs, table;
};

struct Dims {
  Dim of[DIMS];
};

struct Call {
  u32 thread, count;
};

struct Words {
  u32 x, y, z, w;
};

// ---- indices

__device__ u64 along(u64 at, const Dim& dim, const i64* runs) {
#if RUNS
  if (dim.runs > 1) {
    const i64* begins = runs + dim.table;  // start of each run in the block, followed by the offsets to global indices
    u64 low = 0, high = dim.runs;
    while (high - low > 1) {
      u64 middle = (low + high) / 2;
      if (begins[middle] <= (i64)at) low = middle; else high = middle;
    }
    return at + begins[dim.runs + low];
  }
#endif
  return at + dim.start;
}

// The index of an element along the dims [from, to); it may be past the end of the outermost dim.
__device__ u64 index_of(INDEX element, int from, int to, const Dims& dims, const i64* runs) {
  u64 index = 0;
#pragma unroll
  for (int d = to - 1; d >= from; --d) {
    INDEX at = element;
    if (d > from) {
      INDEX size = (INDEX)dims.of[d].size;
      element = at / size;
      at -= element * size;
    }
    index += along(at, dims.of[d], runs) * dims.of[d].stride;
  }
  return index;
}

__device__ Call call_of(u32 index, u32& word) {
#if VECTOR > 1
  u32 turn = index / (THREADS * VECTOR), rest = index % (THREADS * VECTOR);
  word = rest % VECTOR % 4;
  return {rest / VECTOR, turn * ((VECTOR + 3) / 4) + rest % VECTOR / 4};
#else
  u32 turn = index / THREADS;
  word = turn % VALUES;
  return {index % THREADS, turn / VALUES};
#endif
}

// ---- random numbers

__device__ Words philox(u64 seed, u64 counter, u32 thread) {
  u32 key_x = (u32)seed, key_y = (u32)(seed >> 32);
  Words c = {(u32)counter, (u32)(counter >> 32), thread, 0};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    u64 first = (u64)0xD2511F53u * c.x, second = (u64)0xCD9E8D57u * c.z;
    c = {(u32)(second >> 32) ^ c.y ^ key_x, (u32)second, (u32)(first >> 32) ^ c.w ^ key_y, (u32)first};
    key_x += 0x9E3779B9u;
    key_y += 0xBB67AE85u;
  }
  return c;
}

__device__ u32 pick(const Words& words, u32 word) {
  u32 low = word & 1 ? words.y : words.x, high = word & 1 ? words.w : words.z;
  return word & 2 ? high : low;
}

__device__ double unit(u32 low, u32 high) { return ((u64)low ^ (u64)high << 21) * 0x1p-53 + 0x1p-54; }

// Uniform in (0, 1]. The last argument selects the type.
__device__ float uniform_of(const Words& words, u32 word, float) { return pick(words, word) * 0x1p-32f + 0x1p-33f; }
__device__ double uniform_of(const Words& words, u32 word, double) {
  return word ? unit(words.z, words.w) : unit(words.x, words.y);
}

// Normal by Box and Muller: first the sine, then the cosine.
__device__ float normal_of(const Words& words, u32 word, float) {
  const float turn = 0x1p-32f * 6.2831855f;
  float u = (word & 2 ? words.z : words.x) * 0x1p-32f + 0x1p-33f;
  float v = (word & 2 ? words.w : words.y) * turn + turn / 2;
  float radius = sqrtf(-2.0f * logf(u)), sine, cosine;
  __sincosf(v, &sine, &cosine);
  return (word & 1 ? cosine : sine) * radius;
}
__device__ double normal_of(const Words& words, u32 word, double) {
  double u = unit(words.x, words.y);
  double v = ((u64)words.z ^ (u64)words.w << 21) * 0x1p-52 + 0x1p-53;
  double radius = sqrt(-2.0 * log(u)), sine, cosine;
  sincospi(v, &sine, &cosine);
  return (word ? cosine : sine) * radius;
}

// torch uses fast functions for float, exact ones for double.
__device__ float log_of(float x) { return __logf(x); }
__device__ double log_of(double x) { return log(x); }
__device__ float log1p_of(float x) { return __logf(1.0f + x); }
__device__ double log1p_of(double x) { return log1p(x); }
__device__ float exp_of(float x) { return __expf(x); }
__device__ double exp_of(double x) { return exp(x); }
__device__ float epsilon_of(float) { return 0x1p-23f; }
__device__ double epsilon_of(double) { return 0x1p-52; }

__device__ float tangent(float u) {
  u = u > 1 - 0x1p-23f ? 1 - 0x1p-23f : u;
  u = u < 0x1p-23f ? 0x1p-23f : u;
  return __tanf(3.14159265358979323846f * (u - 0.5f));
}
__device__ double tangent(double u) { return tan(3.14159265358979323846 * (u - 0.5)); }

// ---- distributions: an element of a call, with the arguments of the operator

__device__ scalar uniform(const Words& words, u32 word, const Fill& fill) {
  scalar from = static_cast<scalar>(fill.a), to = static_cast<scalar>(fill.b);
  real range = static_cast<scalar>((real)to - (real)from);
  scalar value = static_cast<scalar>(uniform_of(words, word, real()) * range + (real)from);
  return (real)value == (real)to ? from : value;  // (from, to] becomes [from, to)
}

__device__ scalar normal(const Words& words, u32 word, const Fill& fill) {
  return static_cast<scalar>(normal_of(words, word, real()) * (real)fill.b + (real)fill.a);
}

__device__ scalar log_normal(const Words& words, u32 word, const Fill& fill) {
  return static_cast<scalar>(exp_of(normal_of(words, word, real()) * (real)fill.b + (real)fill.a));
}

__device__ scalar exponential(const Words& words, u32 word, const Fill& fill) {
  real u = uniform_of(words, word, real()), half_epsilon = epsilon_of(real()) / 2;
  real logarithm = u >= (real)1 - half_epsilon ? -half_epsilon : log_of(u);
  return static_cast<scalar>((real)-1 / (real)fill.a * logarithm);
}

__device__ scalar cauchy(const Words& words, u32 word, const Fill& fill) {
  return static_cast<scalar>((real)fill.a + (real)fill.b * tangent(uniform_of(words, word, real())));
}

__device__ scalar geometric(const Words& words, u32 word, const Fill& fill) {
  real p = (real)fill.a;
  return static_cast<scalar>((real)ceil(log_of(uniform_of(words, word, real())) / log1p_of(-p)));
}

__device__ scalar bernoulli(const Words& words, u32 word, const Fill& fill) {
  return static_cast<scalar>((real)(uniform_of(words, word, real()) < (real)fill.a));
}

// The mask of dropout draws floats for every dtype, and compares them with the probability of keeping an element.
__device__ scalar keep(const Words& words, u32 word, const Fill& fill) {
  return static_cast<scalar>((real)(uniform_of(words, word, float()) < (real)fill.a));
}

__device__ scalar integers(const Words& words, u32 word, const Fill& fill) {
  return static_cast<scalar>((i64)(pick(words, word) % (u32)fill.range + (u64)fill.low));
}

__device__ scalar wide_integers(const Words& words, u32 word, const Fill& fill) {
  u64 drawn = word ? (u64)words.z << 32 | words.w : (u64)words.x << 32 | words.y;
  return static_cast<scalar>((i64)((fill.range ? drawn % fill.range : drawn) + (u64)fill.low));
}

// ---- one thread fills VALUES elements

#if SHARED < 0

// Elements in any order. Philox is called again when the next element needs another call.
__device__ void fill_by_thread(u32 thread, const Fill& fill, const Dims& dims) {
  u32 spread = (u32)fill.spread, group = thread / spread;
  i64 element = fill.base + (i64)group * (spread * VALUES) + (thread - group * spread);
  Call made = {~0u, ~0u};
  Words words;
#pragma unroll
  for (int k = 0; k < VALUES; ++k, element += spread) {
    if (element >= fill.last) return;
    u32 word;
    Call call = call_of((u32)(index_of((INDEX)element, 0, DIMS, dims, fill.runs) - fill.start), word);
    if (call.thread != made.thread || call.count != made.count) {
      words = philox(fill.seed, fill.counter + call.count, call.thread);
      made = call;
    }
    fill.out[element] = DISTRIBUTION(words, word, fill);
  }
}

#elif VECTOR > 1

struct __align__(VALUES * sizeof(scalar)) Neighbours {
  scalar of[VALUES];
};

// Consecutive elements of one call.
__device__ void fill_by_thread(u32 thread, const Fill& fill, const Dims& dims) {
  i64 element = fill.base + (i64)thread * VALUES;
  if (element >= fill.last) return;
  u32 word;
  Call call = call_of((u32)(index_of((INDEX)element, 0, DIMS, dims, fill.runs) - fill.start), word);
  Words words = philox(fill.seed, fill.counter + call.count, call.thread);
  Neighbours drawn;
#pragma unroll
  for (int k = 0; k < VALUES; ++k) drawn.of[k] = DISTRIBUTION(words, k, fill);
  if (element >= fill.first && element + VALUES <= fill.last && (u64)(fill.out + element) % sizeof(drawn) == 0) {
    *reinterpret_cast<Neighbours*>(fill.out + element) = drawn;
    return;
  }
#pragma unroll
  for (int k = 0; k < VALUES; ++k, ++element)
    if (element >= fill.first && element < fill.last) fill.out[element] = drawn.of[k];
}

#else

// Elements of one call, at the distance THREADS in the global tensor; then those of the next calls. The groups of a slab
// start where torch's threads make a call, which may be before the start of the slab.
__device__ void fill_by_thread(u32 thread, const Fill& fill, const Dims& dims) {
  const u32 cycle = THREADS * VALUES;
  u32 spread = (u32)fill.spread, chunk = thread / spread, lane = thread - chunk * spread;
  chunk += (u32)fill.base;
  u32 slab = chunk / (u32)fill.chunks;
  u32 group = (chunk - slab * (u32)fill.chunks) * (u32)fill.groups;

  u64 begin = index_of(slab, 0, SHARED, dims, fill.runs) + dims.of[SHARED].start * dims.of[SHARED].stride;
  u32 missing = (u32)((begin + cycle - fill.start % cycle) % cycle);
  u32 index = (u32)(begin - fill.start) - missing + group * cycle;
#if SHARED == DIMS - 1
  u32 lead = missing;
  index += lane;
#else
  u32 stride = (u32)dims.of[SHARED].stride, inner = (u32)fill.inner, row = lane / inner;
  u32 lead = missing / stride * inner;
  index += row * stride + (u32)index_of(lane - row * inner, SHARED + 1, DIMS, dims, fill.runs);
#endif

  i64 from = (i64)slab * (i64)fill.slab, to = min(from + (i64)fill.slab, fill.last);
  i64 element = from + (i64)group * (spread * VALUES) + lane - lead;
  from = max(from, fill.first);
  const u32 reach = spread * (VALUES - 1);
  for (u32 turn = 0; turn < (u32)fill.groups; ++turn, index += cycle, element += spread * VALUES) {
    if (element + reach < from || element >= to) continue;  // and index may be below zero
    Words words = philox(fill.seed, fill.counter + index / cycle, index % THREADS);
    bool whole = element >= from && element + reach < to;
#pragma unroll
    for (int k = 0; k < VALUES; ++k) {
      i64 at = element + k * spread;
      if (whole || (at >= from && at < to)) fill.out[at] = DISTRIBUTION(words, k, fill);
    }
  }
}

#endif

extern "C" __global__ void __launch_bounds__(256) fill_block(Fill fill, Dims dims) {
  fill_by_thread(blockIdx.x * 256u + threadIdx.x, fill, dims);
}
