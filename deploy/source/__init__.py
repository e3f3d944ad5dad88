"""What makes the files of deploy/prometheus and deploy/grafana; no part of the product."""
