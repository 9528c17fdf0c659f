"""Host memory plays a CUDA device: vLLM's CUDA platform class, GPU worker, both model runners, asynchronous scheduling
and FlashAttention backend run here without a GPU, with real arithmetic. Users run these; the CPU platform has none.

What stands in: torch.cuda and the launch of Triton kernels (``device``: Triton's interpreter runs vLLM's own), compiled
kernels and attention (``arithmetic``, in torch), and ``Worker.init_device`` (``platform``). All else is
vLLM's, and ours. A row's result does not depend on its batch, so answers may be compared bit by bit.

What it cannot show: streams (a call has done its work when it returns), the card's own arithmetic and kernels, CUDA
graphs, NCCL, page-locked memory, and copies over a bus. Memory is host memory to our engine, too.
"""
