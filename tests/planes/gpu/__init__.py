"""The direct plane of a server whose slots are on a GPU, as an engine's process sees it; without a GPU, over the driver
of tests/fakes/libcuda. Run in processes that have Triton's interpreter: tests/planes/test_gpu_direct.py.
"""
