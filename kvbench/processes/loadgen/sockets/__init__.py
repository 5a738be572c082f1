"""The generator's sockets: the loop that reads them (compiled if possible), stamps, connections."""
