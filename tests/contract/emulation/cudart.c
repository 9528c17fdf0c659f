/* libcudart.so.12 for machines without a GPU: the two functions that NIXL's GDS plugins call. One device, number 0. */
int cudaSetDevice(int device) { return device == 0 ? 0 : 101; /* invalid device ordinal */ }

const char *cudaGetErrorString(int error) { return error ? "emulated CUDA error" : "no error"; }
