// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/verification.hpp - reads everything that the stores of a job would give back, and compares it with
// its checksums; also while the job trains on.
//
// No lock is taken, and nothing is written: a training is neither kept from its store nor from starting. A tile that
// does not match is damaged if its commit was still the newest that all ranks have, after the tile had been read: what
// the newest commit needs is not written over. Otherwise training has gone on, and the tile is read again as the newer
// commit has it. Files of all ranks need not be here: those that are here are read.
//
// Threading  Pure functions on the file system.
// Memory     The tables of one rank's records at a time, and a buffer of a few MiB.
// Errors     Those of look_at_job(). If one commit cannot be verified, its Verification says why.
// Main path  look_at_job -> StoreReader::check, piece by piece -> look_at_job once more where something does not match.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <hoist/core/error.hpp>

namespace hoist {

struct VerifyOptions {
  std::uint64_t bytes_per_second = 0;  // that are read at most, on average; 0: as fast as the drives
  // Called with bytes done and bytes in all of one commit. An exception from it ends the verification, and is rethrown.
  std::function<void(std::uint64_t, std::uint64_t)> progress{};
};

// The result of reading the newest commit, or a named checkpoint.
struct Verification {
  std::string name{};       // of a named checkpoint; empty: the newest commit
  std::uint64_t step = 0;   // that was read; the last of them, where training went on meanwhile
  std::uint64_t bytes = 0;  // that were checked
  std::vector<CorruptionError> damage{};
  std::string not_done{};  // why there is no verdict; empty if there is one
  bool retired = false;    // there is none because newer checkpoints took this one's place meanwhile, as they should
  bool is_sound() const { return damage.empty() && (not_done.empty() || retired); }
};

// The newest commit of the stores of a job, one below each of `directories`, and then each named checkpoint, those of
// older stores (StoredJob::older) last.
std::vector<Verification> verify_job(std::span<const std::string> directories, const VerifyOptions& options = {});

}  // namespace hoist
