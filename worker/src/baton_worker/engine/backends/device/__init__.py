"""The engine of a device: what one step is there, over any framework's memory and any kernels.

Owns the device's buffers, the order of a step's launches, and its way back to the host. Knows no
framework and no kernel: both come through `seam`. Knows neither queues nor records.
"""
