#include "bindings.hpp"
#include "index.hpp"

namespace pystale::bindings {

void bind_index(pybind11::module_& m) { (void)m; }

}  // namespace pystale::bindings
