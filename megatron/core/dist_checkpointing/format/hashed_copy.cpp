// Copies and writes of host memory that hash the bytes on their way, without the interpreter. Called through
// hashed_copy.py.
//
// `memmove` reads the target into the cache before it writes to it, and a hash after the copy reads the bytes again.
// Here a byte is read once, and stores go past the cache ("streaming"), because the disk reads the target next.
//
// The hash is XXH3_64bits without a seed, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, in its form
// for more than 240 bytes. It is a loop over stripes of 64 bytes into eight accumulators of 64 bits.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

constexpr size_t kStripe = 64;
constexpr size_t kMinBlockSize = 256;

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include <cstring>

#define AVX2 __attribute__((target("avx2")))

namespace {

constexpr uint32_t kPrime32[] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0x85EBCA77C2B2AE63u,
                                 0x27D4EB2F165667C5u};
constexpr uint64_t kAvalanche = 0x165667919E3779F9u;

constexpr size_t kStripesPerRound = 16;  // the accumulators are scrambled after each round
constexpr size_t kPrefetchDistance = 2048;

// The secret of the specification, and the offsets at which its parts are used.
constexpr unsigned char kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
constexpr size_t kSecretStep = 8;  // per stripe of a round
constexpr size_t kScrambleSecret = 128;
constexpr size_t kLastStripeSecret = 121;
constexpr size_t kMergeSecret = 11;

// Eight accumulators.
struct Accumulators {
  __m256i low, high;
};

uint64_t read64(const unsigned char* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

AVX2 __m256i load(const unsigned char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

// Return the sum of an accumulator, its neighbor's input, and the product of the halves of input ^ secret.
AVX2 __m256i accumulate(__m256i sum, __m256i input, const unsigned char* secret) {
  const __m256i keyed = _mm256_xor_si256(input, load(secret));
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  const __m256i neighbor = _mm256_shuffle_epi32(input, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(_mm256_add_epi64(sum, neighbor), product);
}

// Return (sum ^ sum >> 47 ^ secret) * prime.
AVX2 __m256i scramble(__m256i sum, const unsigned char* secret) {
  const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), load(secret));
  const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32[0]));
  const __m256i low = _mm256_mul_epu32(mixed, prime);
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
  return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

uint64_t merge(const uint64_t (&sums)[8], size_t length) {
  uint64_t hash = length * kPrime64[0];
  for (size_t pair = 0; pair < 4; ++pair) {
    const unsigned char* secret = kSecret + kMergeSecret + 16 * pair;
    const uint64_t first = sums[2 * pair] ^ read64(secret);
    const uint64_t second = sums[2 * pair + 1] ^ read64(secret + 8);
    const unsigned __int128 product = static_cast<unsigned __int128>(first) * second;
    hash += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  hash ^= hash >> 37;
  hash *= kAvalanche;
  return hash ^ hash >> 32;
}

// Return the hash of `length` bytes; copy them to `target`, which is aligned to 32 bytes, unless it is null.
template <bool kCopies>
AVX2 uint64_t hash_block(unsigned char* target, const unsigned char* source, size_t length) {
  const uint64_t start[8] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                             kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
  Accumulators sums{load(reinterpret_cast<const unsigned char*>(start)),
                    load(reinterpret_cast<const unsigned char*>(start + 4))};
  const size_t stripes = length / kStripe;
  for (size_t stripe = 0; stripe < stripes; ++stripe) {
    const unsigned char* from = source + stripe * kStripe;
    _mm_prefetch(reinterpret_cast<const char*>(from + kPrefetchDistance), _MM_HINT_T0);  // never faults
    const __m256i low = load(from);
    const __m256i high = load(from + kStripe / 2);
    if (kCopies) {
      unsigned char* to = target + stripe * kStripe;
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + kStripe / 2), high);
    }
    const size_t place = stripe % kStripesPerRound;
    const bool is_last = stripe == stripes - 1;
    const size_t secret = is_last ? kLastStripeSecret : place * kSecretStep;
    sums.low = accumulate(sums.low, low, kSecret + secret);
    sums.high = accumulate(sums.high, high, kSecret + secret + kStripe / 2);
    if (place == kStripesPerRound - 1 && !is_last) {
      sums.low = scramble(sums.low, kSecret + kScrambleSecret);
      sums.high = scramble(sums.high, kSecret + kScrambleSecret + kStripe / 2);
    }
  }
  uint64_t values[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), sums.low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + 4), sums.high);
  return merge(values, length);
}

bool is_supported() { return __builtin_cpu_supports("avx2"); }

void hash_blocks(unsigned char* target, const unsigned char* source, size_t num_blocks, size_t block_size,
                 unsigned char* digests) {
  for (size_t block = 0; block < num_blocks; ++block) {
    const size_t start = block * block_size;
    const uint64_t hash = target == nullptr ? hash_block<false>(nullptr, source + start, block_size)
                                            : hash_block<true>(target + start, source + start, block_size);
    for (int shift = 56; shift >= 0; shift -= 8) *digests++ = static_cast<unsigned char>(hash >> shift);
  }
  _mm_sfence();  // streaming stores become visible to other threads
}

}  // namespace

#else

namespace {

bool is_supported() { return false; }

void hash_blocks(unsigned char*, const unsigned char*, size_t, size_t, unsigned char*) {
  throw std::runtime_error("not supported on this processor");
}

}  // namespace

#endif

void check_block_size(size_t block_size) {
  if (block_size % kStripe != 0 || block_size < kMinBlockSize)
    throw std::invalid_argument("blocks must be whole stripes");
}

// Copy consecutive blocks and return their digests, 8 bytes each, big-endian.
py::bytes copy_and_hash(uintptr_t target, uintptr_t source, size_t num_blocks, size_t block_size) {
  check_block_size(block_size);
  if (target % 32 != 0) throw std::invalid_argument("the target must be aligned to 32 bytes");
  std::string digests(num_blocks * 8, '\0');
  {
    py::gil_scoped_release release;
    hash_blocks(reinterpret_cast<unsigned char*>(target), reinterpret_cast<const unsigned char*>(source), num_blocks,
                block_size, reinterpret_cast<unsigned char*>(&digests[0]));
  }
  return py::bytes(digests);
}

// A piece of a file: its position, and the address and the number of its blocks.
using Piece = std::tuple<int64_t, uintptr_t, size_t>;

// Return whether `pwrite` has written all bytes.
bool write_all(int descriptor, const unsigned char* bytes, size_t length, int64_t position) {
  while (length > 0) {
    const ssize_t written = pwrite(descriptor, bytes, length, position);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes += written;
    length -= written;
    position += written;
  }
  return true;
}

// Write pieces until a write fails. Returns the digests of each piece that was written.
std::vector<py::bytes> hash_and_write(int descriptor, const std::vector<Piece>& pieces, size_t block_size) {
  check_block_size(block_size);
  std::vector<std::string> digests;
  {
    py::gil_scoped_release release;
    for (const auto& [position, address, num_blocks] : pieces) {
      const auto* bytes = reinterpret_cast<const unsigned char*>(address);
      std::string hashes(num_blocks * 8, '\0');
      hash_blocks(nullptr, bytes, num_blocks, block_size, reinterpret_cast<unsigned char*>(&hashes[0]));
      if (!write_all(descriptor, bytes, num_blocks * block_size, position)) break;
      digests.push_back(std::move(hashes));
    }
  }
  return {digests.begin(), digests.end()};
}

PYBIND11_MODULE(hashed_copy_cpp, module) {
  module.doc() = "Copies and writes that hash the bytes on their way";
  module.def("is_supported", &is_supported);
  module.def("copy_and_hash", &copy_and_hash);
  module.def("hash_and_write", &hash_and_write);
}
