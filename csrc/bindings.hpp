#pragma once
#include <pybind11/pybind11.h>

namespace pystale::bindings {

void bind_kernels(pybind11::module_& m);
void bind_index(pybind11::module_& m);

}  // namespace pystale::bindings
