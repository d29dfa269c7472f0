"""What a server exports, and the Prometheus and Grafana files that look at it."""
