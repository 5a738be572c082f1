"""The generator's sockets: the loop that reads them, in C where it was compiled; stamps, connections."""
