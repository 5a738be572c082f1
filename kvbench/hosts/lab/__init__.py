"""Two hosts on one machine: network namespaces connected by shaped veth pairs, one per NIC."""
