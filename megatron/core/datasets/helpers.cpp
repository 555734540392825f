// Loops over documents and samples that build dataset indices. Called through index_helpers.py, which checks the
// arguments.
//
// All counters are 64-bit; only stored values are narrowed, to a type that the caller chooses large enough.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Fill row j of `rows` with the start of sample j: (position in document_index, token offset). There are `seq_length`
// tokens between two rows, and a sample reads `extra_tokens` more. A row stays in the document of the preceding token,
// so a sample that ends with its document is followed by (that document, its length - extra_tokens).
template <typename Index>
void fill_sample_index(const int32_t* lengths, int64_t num_sequences, const int32_t* document_index,
                       int64_t num_documents, int64_t seq_length, int64_t extra_tokens, int64_t num_samples,
                       Index* rows) {
  int64_t position = 0, offset = 0;
  rows[0] = rows[1] = 0;
  for (int64_t sample = 1; sample <= num_samples; ++sample) {
    int64_t remaining = seq_length + extra_tokens;
    for (;;) {
      const int64_t sequence = position < num_documents ? document_index[position] : -1;
      if (sequence < 0 || sequence >= num_sequences)
        throw std::out_of_range("position " + std::to_string(position) + " of the document index holds sequence " +
                                std::to_string(sequence) + " of " + std::to_string(num_sequences));
      const int64_t available = lengths[sequence] - offset;
      if (available >= remaining) {
        offset += remaining - extra_tokens;
        break;
      }
      if (position == num_documents - 1) {
        if (sample != num_samples)
          throw std::out_of_range("the documents end in sample " + std::to_string(sample - 1) + " of " +
                                  std::to_string(num_samples));
        offset = lengths[sequence] - extra_tokens;  // the last sample is shorter than the others
        break;
      }
      remaining -= available;
      ++position;
      offset = 0;
    }
    rows[2 * sample] = static_cast<Index>(position);
    rows[2 * sample + 1] = static_cast<Index>(offset);
  }
}

template <typename Index>
Array<Index> build_sample_index(const Array<int32_t>& lengths, const Array<int32_t>& document_index, int64_t seq_length,
                                int64_t num_samples, int64_t extra_tokens) {
  Array<Index> index({static_cast<py::ssize_t>(num_samples + 1), static_cast<py::ssize_t>(2)});
  const int32_t *lengths_data = lengths.data(), *documents_data = document_index.data();
  const int64_t num_sequences = lengths.size(), num_documents = document_index.size();
  Index* rows = index.mutable_data();
  {
    py::gil_scoped_release release;
    fill_sample_index(lengths_data, num_sequences, documents_data, num_documents, seq_length, extra_tokens, num_samples,
                      rows);
  }
  return index;
}

// Take the next sample from the member with the largest deficit, weight * max(sample, 1) - count; on ties from the first
// one. A member contributes at most `limit` samples.
constexpr size_t kLanes = 8;  // the compiler turns each block of members into vector maxima

void fill_blend_index(std::vector<double> weights, const int64_t* limits, int64_t size, int16_t* dataset_index,
                      int64_t* dataset_sample_index) {
  constexpr double kNever = -std::numeric_limits<double>::infinity();
  const size_t num_members = weights.size();
  for (size_t member = 0; member < num_members; ++member)
    if (limits[member] <= 0) weights[member] = kNever;
  weights.resize((num_members + kLanes - 1) / kLanes * kLanes, kNever);
  std::vector<double> counts(weights.size(), 0.0);  // exact up to 2^53 samples

  for (int64_t sample = 0; sample < size; ++sample) {
    const double scale = static_cast<double>(std::max<int64_t>(sample, 1));
    double best[kLanes];
    std::fill(best, best + kLanes, kNever);
    for (size_t block = 0; block < weights.size(); block += kLanes)
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const double deficit = weights[block + lane] * scale - counts[block + lane];
        best[lane] = deficit > best[lane] ? deficit : best[lane];
      }
    const double largest = *std::max_element(best, best + kLanes);
    if (largest == kNever)
      throw std::out_of_range("all members are used up after " + std::to_string(sample) + " of " +
                              std::to_string(size) + " samples");
    size_t member = 0;
    while (weights[member] * scale - counts[member] != largest) ++member;

    const int64_t count = static_cast<int64_t>(counts[member]);
    dataset_index[sample] = static_cast<int16_t>(member);
    dataset_sample_index[sample] = count;
    counts[member] += 1.0;
    if (count + 1 == limits[member]) weights[member] = kNever;
  }
}

std::pair<Array<int16_t>, Array<int64_t>> build_blend_index(const Array<double>& weights, const Array<int64_t>& limits,
                                                            int64_t size) {
  Array<int16_t> dataset_index(static_cast<py::ssize_t>(size));
  Array<int64_t> dataset_sample_index(static_cast<py::ssize_t>(size));
  const std::vector<double> weights_copy(weights.data(), weights.data() + weights.size());
  const int64_t* limits_data = limits.data();
  int16_t* datasets = dataset_index.mutable_data();
  int64_t* samples = dataset_sample_index.mutable_data();
  {
    py::gil_scoped_release release;
    fill_blend_index(weights_copy, limits_data, size, datasets, samples);
  }
  return {dataset_index, dataset_sample_index};
}

PYBIND11_MODULE(helpers_cpp, module) {
  module.doc() = "Index builders for GPT datasets";
  module.def("build_sample_index_int32", &build_sample_index<int32_t>);
  module.def("build_sample_index_int64", &build_sample_index<int64_t>);
  module.def("build_blend_index", &build_blend_index);
}
