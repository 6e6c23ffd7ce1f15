#include "bindings.hpp"
#include "kernels.hpp"

namespace pystale::bindings {

void bind_kernels(pybind11::module_& m) { (void)m; }

}  // namespace pystale::bindings
