#include "bindings.hpp"

PYBIND11_MODULE(_core, m) {
    m.doc() = "Array kernels, ModelSteps and StalenessIndex (compiled).";
    pystale::bindings::bind_kernels(m);
    pystale::bindings::bind_index(m);
}
