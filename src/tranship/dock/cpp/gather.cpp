// Copies the arrays of rows into their columns, one behind the other. The arrays are Python objects with the buffer
// protocol; what is used of Python is part of its stable interface, declared here so that no headers are needed.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

extern "C" {

struct Object;

struct View {
    char* data;
    Object* object;
    ptrdiff_t nbytes, itemsize;
    int readonly, ndim;
    char* format;
    ptrdiff_t *shape, *strides, *suboffsets;
    void* internal;
};

int PyObject_GetBuffer(Object*, View*, int);
void PyBuffer_Release(View*);
Object* PyList_GetItem(Object*, ptrdiff_t);
void PyErr_Clear();

// arrays: a list. out: where the next of them goes. lengths: items of each. itemsize: bytes of an item.
struct Column {
    Object* arrays;
    char* out;
    const int64_t* lengths;
    int64_t itemsize;
};

}

namespace {

constexpr size_t kLine = 64;

// Past the caches, where there is a way: nothing is read of the memory that is written.
void stream(char* out, const char* in, size_t nbytes) {
#if defined(__SSE2__)
    size_t head = (kLine - reinterpret_cast<uintptr_t>(out) % kLine) % kLine;
    if (nbytes > head + kLine) {
        memcpy(out, in, head);
        out += head, in += head, nbytes -= head;
        for (; nbytes >= kLine; out += kLine, in += kLine, nbytes -= kLine) {
            auto from = reinterpret_cast<const __m128i*>(in);
            auto to = reinterpret_cast<__m128i*>(out);
            __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
            __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
        }
    }
#endif
    memcpy(out, in, nbytes);
}

// Whether the array was as long as its column says.
bool copy(Column& column, int64_t row, bool past_caches) {
    View view;
    Object* array = PyList_GetItem(column.arrays, row);
    if (array == nullptr || PyObject_GetBuffer(array, &view, 0) != 0) {
        PyErr_Clear();
        return false;
    }
    bool is_right = view.nbytes == column.lengths[row] * column.itemsize;
    if (is_right) {
        if (past_caches)
            stream(column.out, view.data, view.nbytes);
        else
            memcpy(column.out, view.data, view.nbytes);
        column.out += view.nbytes;
    }
    PyBuffer_Release(&view);
    return is_right;
}

}

// The rows [first, end) of columns, row by row or column by column. past_caches: this processor is not to keep them.
// Returns 0, or -1 for an array that does not lie in one piece, or is not as long as was said.
extern "C" int gather(Column* columns, int64_t num_columns, int64_t first, int64_t end, int by_row, int past_caches) {
    bool is_right = true;
    if (by_row) {
        for (int64_t row = first; row < end && is_right; ++row)
            for (int64_t i = 0; i < num_columns && is_right; ++i) is_right = copy(columns[i], row, past_caches);
    } else {
        for (int64_t i = 0; i < num_columns && is_right; ++i)
            for (int64_t row = first; row < end && is_right; ++row) is_right = copy(columns[i], row, past_caches);
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
    return is_right ? 0 : -1;
}
