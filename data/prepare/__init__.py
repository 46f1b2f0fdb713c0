"""Documents read, changed, dropped and written, by the steps that prepare them."""
