#include <pybind11/numpy.h>

#include <bit>
#include <optional>
#include <string>

#include "bindings.hpp"
#include "bindings_arguments.hpp"

namespace pystale::bindings {

namespace py = pybind11;

namespace {

std::optional<Element> element_of(const py::dtype& dtype) {
    const bool is_signed = dtype.kind() == 'i';
    if (!is_signed && dtype.kind() != 'u' && dtype.kind() != 'b') return std::nullopt;
    switch (dtype.itemsize()) {
        case 1:
            return is_signed ? Element::i8 : Element::u8;
        case 2:
            return is_signed ? Element::i16 : Element::u16;
        case 4:
            return is_signed ? Element::i32 : Element::u32;
        case 8:
            return is_signed ? Element::i64 : Element::u64;
        default:
            return std::nullopt;
    }
}

ArrayKind view_array(PyObject* object, ArrayView* view) {
    if (!py::isinstance<py::array>(object)) return ArrayKind::not_an_array;
    const auto array = py::reinterpret_borrow<py::array>(object);
    const py::dtype dtype = array.dtype();
    const std::optional<Element> element = element_of(dtype);
    if (!element) return ArrayKind::other_dtype;
    // NumPy writes '=' or '|' for the order of this machine.
    constexpr char kForeign = std::endian::native == std::endian::little ? '>' : '<';
    view->layout.data = static_cast<std::byte*>(const_cast<void*>(array.data()));
    view->layout.item_size = item_size(*element);
    view->layout.axes = static_cast<int>(array.ndim());
    view->layout.shape = array.shape();
    view->layout.strides = array.strides();
    view->element = *element;
    view->swapped = dtype.byteorder() == kForeign;
    view->boolean = dtype.kind() == 'b';
    view->writable = array.writeable();
    return ArrayKind::integers;
}

// Straight to NumPy's constructor: py::array would copy shape and strides to the heap first, which for the mask of a
// three-token response costs as much as everything else together.
PyObject* create_array(Element element, bool boolean, int axes, const Py_ssize_t* shape) {
    using Numpy = py::detail::npy_api;
    const Numpy& numpy = Numpy::get();
    const int type = boolean ? Numpy::NPY_BOOL_ : element == Element::u8 ? Numpy::NPY_UBYTE_ : Numpy::NPY_INT64_;
    PyObject* const dtype = numpy.PyArray_DescrFromType_(type);  // the constructor takes the reference
    return numpy.PyArray_NewFromDescr_(numpy.PyArray_Type_, dtype, axes, shape, nullptr, nullptr, 0, nullptr);
}

constexpr ArrayTable kArrays{view_array, create_array};

std::string compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#elif defined(_MSC_VER)
    return "msvc " + std::to_string(_MSC_VER);
#else
    return "unknown";
#endif
}

py::dict build_info() {
    py::dict info;
    info["version"] = PYSTALE_VERSION;
    info["compiler"] = compiler();
#if defined(PYSTALE_MULTIVERSION)
    info["multiversioned"] = true;
#else
    info["multiversioned"] = false;
#endif
    info["cpu_level"] = cpu_level();
    return info;
}

constexpr const char* kBuildInfoDoc = R"(How the compiled part was built, and what of it runs on this machine.

Returns
-------
dict
    ``version`` : str, of the compiled modules.
    ``compiler`` : str, name and version.
    ``multiversioned`` : bool, whether the kernels exist for several CPU levels.
    ``cpu_level`` : str, the level whose kernels run: ``"x86-64-v4"`` (AVX-512), ``"x86-64-v3"`` (AVX2), or
    ``"baseline"`` (what the compiler was told to assume).

Examples
--------
>>> import pystale
>>> sorted(pystale.build_info())
['compiler', 'cpu_level', 'multiversioned', 'version']
)";

}  // namespace

void bind_kernels(py::module_& m) {
    m.def("build_info", &build_info, kBuildInfoDoc);
    m.attr("build_info").attr("__module__") = "pystale";
    py::detail::npy_api::get();  // imports NumPy here, where failing is an ImportError
    m.attr("_arrays") = py::capsule(&kArrays, "pystale._core._arrays");
}

}  // namespace pystale::bindings
