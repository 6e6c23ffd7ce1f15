#include "bindings.hpp"
#include "runs.hpp"

namespace pystale::bindings {

void bind_runs(pybind11::module_& m) { (void)m; }

}  // namespace pystale::bindings
