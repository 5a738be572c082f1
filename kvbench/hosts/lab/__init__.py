"""Two hosts on one machine: network namespaces joined by shaped veth pairs, one for each NIC."""
