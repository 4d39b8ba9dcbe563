# SPDX-License-Identifier: Apache-2.0
# Two reports of hoist-gpt, A without groups of ranks and B with: the same state at the end, and B has used its groups.
file(READ ${A} a)
file(READ ${B} b)
string(JSON digest_a GET "${a}" digest)
string(JSON digest_b GET "${b}" digest)
string(JSON in_group ERROR_VARIABLE none GET "${b}" links wire bytes_in_group)
if(NOT digest_a STREQUAL digest_b)
  message(FATAL_ERROR "the states differ: ${digest_a} and ${digest_b}")
endif()
if(none)
  message(FATAL_ERROR "no group has gathered anything: ${none}")
endif()
message(STATUS "the same state; ${in_group} bytes went within the group")
