from node_app.main import main

main()
