// SPDX-License-Identifier: Apache-2.0
// examples/gpt/main.cpp - hoist-gpt: trains a byte-level GPT on one text with three-tier offload.
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include <sys/resource.h>

#include <hoist/core/standard_descriptors.hpp>

#include "arguments.hpp"
#include "run.hpp"

namespace {
bool memory_is_limited() {
  rlimit address_space{}, data{};
  ::getrlimit(RLIMIT_AS, &address_space);
  ::getrlimit(RLIMIT_DATA, &data);
  return address_space.rlim_cur != RLIM_INFINITY || data.rlim_cur != RLIM_INFINITY;
}
}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond `ulimit -f` becomes an error that names it instead of a signal
  std::signal(SIGPIPE, SIG_IGN);  // a reader of the log that has exited does not end the training
  hoist::occupy_standard_descriptors();
  const auto parsed = hoist::gpt::parse_arguments(argc, argv);
  if (const int* code = std::get_if<int>(&parsed)) return *code;
  const int code = hoist::gpt::run(std::get<hoist::gpt::Arguments>(parsed));
  if (code == 0 || !memory_is_limited()) return code;
  // Where a memory limit is reached, OpenBLAS's threads retry their allocations for ever, and its destructor would wait
  // for them.
  std::fflush(nullptr);
  std::_Exit(code);
}
