# SPDX-License-Identifier: Apache-2.0
"""Writes bindings for C++11: an owner for each handle, defaults for each struct, errors as exceptions. All other
declarations are those of the C header."""

from __future__ import annotations

from abi_table import Model
from in_rust import camel

PATH = "cpp/sluice/sluice.hpp"
HEAD = """\
/* Owners of the handles, defaults of the structs and errors as exceptions.
 * {generated}
 *
 *   auto config = sluice::defaults<sluice_moe_config_t>();
 *   sluice::Moe moe;
 *   sluice::check(sluice_moe_create(context.get(), &config, moe.out()));
 *
 * Everything else is plain C: sluice/sluice.h has the calls and their contracts. Needs C++11 or newer, and libsluice
 * alone. Callbacks must not throw. */
#ifndef SLUICE_SLUICE_HPP_
#define SLUICE_SLUICE_HPP_

#include <cstdint>
#include <stdexcept>
#include <string>

#include "sluice/sluice.h"

namespace sluice {{

/* The error of a call. */
class Error : public std::runtime_error {{
 public:
  explicit Error(const sluice_error_info_t& info)
      : std::runtime_error(std::string(sluice_status_name(info.status)) + ": " + info.message),
        status_(info.status),
        peer_(info.peer) {{}}
  sluice_status_t status() const noexcept {{ return status_; }}
  /* The rank at fault; -1: unknown. */
  std::int32_t peer() const noexcept {{ return peer_; }}

 private:
  sluice_status_t status_;
  std::int32_t peer_;
}};

/* Throws if this thread's last call, which returned `status`, has failed. */
inline void check(sluice_status_t status) {{
  if (status == SLUICE_OK) return;
  sluice_error_info_t info;
  sluice_error_info_init(&info, sizeof info);
  sluice_error_last(&info);
  info.status = status;
  throw Error(info);
}}

/* Owns a handle, or nothing. Can be moved, but not copied. */
template <class T, void (*Release)(T*)>
class Owner {{
 public:
  Owner() noexcept = default;
  explicit Owner(T* owned) noexcept : owned_(owned) {{}}
  Owner(Owner&& other) noexcept : owned_(other.release()) {{}}
  Owner& operator=(Owner&& other) noexcept {{
    if (this != &other) reset(other.release());
    return *this;
  }}
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() {{ Release(owned_); }}

  T* get() const noexcept {{ return owned_; }}
  explicit operator bool() const noexcept {{ return owned_ != nullptr; }}
  void reset(T* owned = nullptr) noexcept {{
    T* before = owned_;
    owned_ = owned;
    Release(before);
  }}
  /* Returns the handle, which the caller must release. */
  T* release() noexcept {{
    T* owned = owned_;
    owned_ = nullptr;
    return owned;
  }}
  /* For an `out_` argument. Releases the present handle. */
  T** out() noexcept {{
    reset();
    return &owned_;
  }}

 private:
  T* owned_ = nullptr;
}};

"""
MIDDLE = """
/* Returns a struct as its _init writes it; without an _init, zeros and its size. */
template <class T>
T defaults();

"""
TAIL = """
/* A tensor over row-major 32-bit elements on the CPU. Memory and shape are borrowed. */
inline sluice_tensor_t tensor(void* data, std::uint8_t type_code, std::int64_t* shape, std::int32_t ndim) {
  return {data, SLUICE_DEVICE_CPU, 0, ndim, type_code, 32, 1, shape, nullptr, 0};
}

} // namespace sluice

#endif /* SLUICE_SLUICE_HPP_ */
"""


def bindings(m: Model, generated: str) -> str:
    owners = [f"using {camel(name)} = Owner<{name}, {release}>;" for name, release in m.handles.items() if release]
    lines = []
    for struct in m.structs.values():
        init = m.init_of(struct)
        setting = f"{init}(&it, sizeof it);" if init else "it.struct_size = sizeof it;" if struct.grows else None
        lines += ["template <>", f"inline {struct.name} defaults() {{", f"  {struct.name} it = {{}};"]
        lines += [f"  {setting}"] if setting else []
        lines += ["  return it;", "}"]
    return HEAD.format(generated=generated) + "\n".join(owners) + "\n" + MIDDLE + "\n".join(lines) + "\n" + TAIL
