// A walk through the fake NVML by NVIDIA's own Go client: what the fake answers is not only what our own client asks.
// Built with cgo, which needs the C compiler that Rust needs as a linker anyway.
module forewarm.dev/tests/gonvml

go 1.26.0

require github.com/NVIDIA/go-nvml v0.13.4-1
