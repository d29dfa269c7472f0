"""A torch-profiler trace into shares of GPU time: read, categorise, add up, judge, render."""
