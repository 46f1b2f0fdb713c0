"""`ponente tune`: search settings of a train step by formula, checked by the TPU compiler."""
