"""The reference server of the reward protocol: `areal-async reward serve`."""
