"""`ponente tune`: settings of a train step, searched by formula and asked of the TPU compiler."""
