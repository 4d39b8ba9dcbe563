// SPDX-License-Identifier: Apache-2.0
// The extension's one translation unit: most of the time of compiling it goes into PyTorch's headers.
#include "accelerator.cpp"
#include "inference.cpp"
#include "ranks.cpp"
