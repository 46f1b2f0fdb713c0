"""The transformer in Haliax named axes: attention, loss, generation, and FLOP counts."""
