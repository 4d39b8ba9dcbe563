// SPDX-License-Identifier: Apache-2.0
// measure/fill.hpp - fills memory and whole files with bytes that no drive can compress or deduplicate.
//
// Reading unwritten space does not touch the drive (the kernel returns zeros at memory speed), and writing into
// reserved but unwritten space is slower than writing again. A file is therefore written in full before it is measured,
// and that time does not count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include <hoist/measure/interruption.hpp>
#include <hoist/measure/scratch_file.hpp>

namespace hoist::measure {

// Different for every (seed, index), where `index` counts 8-byte words. Pre: whole words.
void fill_random(std::span<std::byte> memory, std::uint64_t seed, std::uint64_t first_index = 0);

// Called from time to time with the bytes written so far, of all files together.
using ProgressFunction = std::function<void(std::uint64_t done_bytes)>;

// Writes every byte of every file, all files at once, and flushes.
// Errors: IoError; Interrupted.
void fill_files(std::span<ScratchFile* const> files, const StopFlag* stop, const ProgressFunction& progress);

}  // namespace hoist::measure
