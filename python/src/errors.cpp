// SPDX-License-Identifier: Apache-2.0
// Every error of core/error.hpp as a Python exception with the same text, and its parts as attributes.
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <hoist/config/config.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/printable.hpp>
#include <hoist/interchange/safetensors.hpp>
#include <hoist/tiers/store_changed_error.hpp>

#include "bindings.hpp"
#include "interruption.hpp"

namespace hoist::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

struct Types {
  nb::object error, usage, config, budget, io, corruption, store, store_changed, device, comm, safetensors;
};
// Lives as long as the interpreter, like the module it belongs to.
Types* types = nullptr;

nb::object make_type(nb::module_& module, const char* name, const char* doc, const nb::object& bases) {
  const std::string full = nb::cast<std::string>(module.attr("__name__")) + "." + name;
  nb::object type = nb::steal(PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), nullptr));
  if (!type.is_valid()) nb::raise_python_error();
  module.attr(name) = type;
  return type;
}

template <typename... Attributes>
void raise(const nb::object& type, const std::exception& error, const Attributes&... attributes) {
  nb::object instance = type(error.what());
  (nb::setattr(instance, attributes.first, nb::cast(attributes.second)), ...);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

template <typename Value>
std::pair<const char*, Value> part(const char* name, Value value) {
  return {name, std::move(value)};
}

// nanobind's conversion to str throws if the text is not UTF-8.
std::pair<const char*, std::string> text(const char* name, const std::string& value) {
  return {name, printable(value)};
}

// The file can be opened by it, whatever its name is.
std::pair<const char*, nb::object> filename(const std::string& path) {
  return {"filename", nb::steal(PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())))};
}

nb::list problems_of(const ConfigProblems& error) {
  nb::list problems;
  for (const ConfigProblem& problem : error.problems) {
    nb::dict entry;
    entry["key"] = problem.key;
    entry["problem"] = problem.problem;
    entry["line"] = problem.line;
    entry["column"] = problem.column;
    problems.append(entry);
  }
  return problems;
}

void translate(const std::exception_ptr& pointer, void*) {
  if (raise_interruption()) return;  // whatever error the call ended with because of it
  try {
    std::rethrow_exception(pointer);
  } catch (const ConfigProblems& e) {
    raise(types->config, e, part("key", e.key), part("problems", problems_of(e)));
  } catch (const ConfigError& e) {
    raise(types->config, e, part("key", e.key), part("problems", nb::list()));
  } catch (const BudgetError& e) {
    raise(types->budget, e, part("tier", e.need.tier), part("have_bytes", e.need.have_bytes),
          part("need_bytes", e.need.need_bytes), text("key", e.need.key), text("detail", e.need.detail));
  } catch (const IoError& e) {
    raise(types->io, e, part("operation", e.where.operation), filename(e.where.path),
          part("offset_bytes", e.where.offset_bytes), part("length_bytes", e.where.length_bytes),
          part("errno", e.where.code));
  } catch (const CorruptionError& e) {
    raise(types->corruption, e, text("unit", e.where.unit), part("region", e.where.region), filename(e.where.path),
          part("offset_bytes", e.where.offset_bytes));
  } catch (const interchange::SafetensorsError& e) {
    raise(types->safetensors, e);
  } catch (const UsageError& e) {
    raise(types->usage, e);
  } catch (const tiers::StoreChangedError& e) {
    raise(types->store_changed, e);
  } catch (const StoreError& e) {
    raise(types->store, e);
  } catch (const DeviceError& e) {
    raise(types->device, e, part("code", e.code));
  } catch (const CommError& e) {
    raise(types->comm, e);
  } catch (const Error& e) {
    raise(types->error, e);
  }
}

}  // namespace

void bind_errors(nb::module_& module) {
  module.def(
      "printable", [](const std::string& text) { return printable(text); }, "text"_a,
      "The text with control characters and what is not UTF-8 written out, for errors and logs about files.");
  types = new Types();
  const auto builtin = [](PyObject* type) { return nb::borrow(type); };
  const nb::object base = builtin(PyExc_Exception);
  const nb::object error =
      make_type(module, "Error", "Base of everything hoist raises; the text says what helps.", base);
  types->error = error;
  const nb::object value_error = nb::make_tuple(error, builtin(PyExc_ValueError));
  const nb::object os_error = nb::make_tuple(error, builtin(PyExc_OSError));
  types->usage =
      make_type(module, "UsageError", "A call that its object does not allow; nothing has changed.", value_error);
  types->config =
      make_type(module, "ConfigError", "Values of a configuration: `problems` lists them all.", value_error);
  types->budget = make_type(module, "BudgetError", "A tier is too small: `need_bytes` would do.",
                            nb::make_tuple(error, builtin(PyExc_MemoryError)));
  types->io = make_type(module, "IoError", "A file or drive failed.", os_error);
  // OSError would put together a text of its own from errno and file name.
  types->io.attr("__str__") = builtin(PyExc_BaseException).attr("__str__");
  types->corruption =
      make_type(module, "CorruptionError", "Bytes came back from NVMe other than they were written.", error);
  types->store = make_type(module, "StoreError", "A store that cannot be used.", error);
  types->store_changed =
      make_type(module, "StoreChangedError", "A store that somebody changed while this program used it.", types->store);
  types->device = make_type(module, "DeviceError", "A device call failed.", error);
  types->comm = make_type(module, "CommError", "A collective failed, or ranks disagree.", error);
  types->safetensors = make_type(module, "SafetensorsError", "Files that are not weights of this model.", error);
  nb::register_exception_translator(translate);
}

}  // namespace hoist::python
