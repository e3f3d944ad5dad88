"""The OpenAI-compatible HTTP server, health probes, metrics and the daemon's status page.

``app`` has the routes, ``request_body`` reads requests, ``generation`` runs them on the engine, and
``openai_response`` writes responses. The engine and the model are accessed through the protocols in
``service``; nothing here imports torch.
"""
