// SPDX-License-Identifier: Apache-2.0
// python/src/attributes.cpp - which dictionaries and lists of a model have changed, found fast enough for every
// hand-over of micro-batches: a model has thousands.
#include <cstddef>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"

namespace hoist::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Compares which objects they hold, and in which order. Calls no comparison of the objects: that of tensors gives
// tensors.
bool hold_the_same(PyObject* list, PyObject* other) {
  const Py_ssize_t count = PyList_GET_SIZE(list);
  if (count != PyList_GET_SIZE(other)) return false;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (PyList_GET_ITEM(list, i) != PyList_GET_ITEM(other, i)) return false;
  return true;
}

bool map_the_same(PyObject* dictionary, PyObject* other) {
  if (PyDict_Size(dictionary) != PyDict_Size(other)) return false;
  Py_ssize_t at = 0, other_at = 0;
  PyObject *key, *value, *other_key, *other_value;
  while (PyDict_Next(dictionary, &at, &key, &value))
    if (!PyDict_Next(other, &other_at, &other_key, &other_value) || key != other_key || value != other_value)
      return false;
  return true;
}

}  // namespace

void bind_attributes(nb::module_& module) {
  module.def(
      "changed",
      [](const nb::list& now, const nb::list& before) {
        std::vector<std::size_t> changed;
        for (std::size_t i = 0; i < nb::len(now); ++i) {
          PyObject *const one = PyList_GET_ITEM(now.ptr(), i), *const other = PyList_GET_ITEM(before.ptr(), i);
          if (!(PyList_Check(one) ? hold_the_same(one, other) : map_the_same(one, other))) changed.push_back(i);
        }
        return changed;
      },
      "now"_a, "before"_a,
      "The indices at which the two lists or dictionaries do not hold the same objects in the same order. Pre: both "
      "have the same type.");
}

}  // namespace hoist::python
